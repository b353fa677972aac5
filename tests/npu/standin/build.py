"""Builds the stand-in for the Ascend runtime: build.py FOLDER

One call of g++ over the sources beside this file makes `libascendcl.so`; the other libraries that
torch_npu asks for are links to it. The headers are those of the installed torch_npu. What its
libraries need and no source defines becomes a symbol that ends the process and names itself.
Nothing happens if FOLDER already holds what these sources make.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent
LIBRARY = "libascendcl.so"
LINKS = (
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libopapi.so",
)
MADE_OF = "made-of"  # the file in FOLDER that names the sources
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror"),
)
# Of the Ascend stack; everything else that torch_npu's libraries lack is libc's or torch's.
SYMBOL = re.compile(r"\s[Uw] ((?:acl|rt[A-Z]|ge[A-Z]|Hccl|Msprof)\w+)$")
TOOLS = {"g++": "g++", "nm": "binutils"}


def main(folder: Path) -> None:
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            sys.exit(
                f"error: {tool} is not installed; on Debian and Ubuntu: apt-get install {package}"
            )
    wheel = folder_of_torch_npu()
    sources = sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), Path(__file__)])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    digest.update(str(wheel).encode())
    made_of = folder / MADE_OF
    if made_of.exists() and made_of.read_text() == digest.hexdigest():
        return
    folder.mkdir(parents=True, exist_ok=True)
    made_of.unlink(missing_ok=True)
    build(folder, wheel)
    made_of.write_text(digest.hexdigest())


def folder_of_torch_npu() -> Path:
    """Where the wheel lies. It cannot be imported: that takes the libraries made here."""
    found = importlib.util.find_spec("torch_npu")
    if found is None or found.origin is None:
        sys.exit("error: torch_npu is not installed here; `make setup-npu` installs it")
    return Path(found.origin).parent


def build(folder: Path, wheel: Path) -> None:
    missing = folder / "missing.cpp"
    missing.write_text(text_of_missing(symbols_of(wheel)))
    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    # Under a new name first: a process may run with the old one.
    made = folder / "new.so"
    include = f"-I{wheel / 'include'}"
    command = ["g++", *FLAGS, include, "-o", str(made), *sources, str(missing)]
    ended = subprocess.run(command, check=False)
    if ended.returncode != 0:
        sys.exit("error: the stand-in does not compile; see above")
    made.replace(folder / LIBRARY)
    for name in LINKS:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(LIBRARY)


def symbols_of(wheel: Path) -> list[str]:
    """What the wheel's libraries want from the Ascend stack."""
    libraries = [*wheel.glob("lib/lib*.so"), *wheel.glob("_C*.so")]
    wanted = set()
    for library in libraries:
        listed = subprocess.run(
            ["nm", "--dynamic", "--undefined-only", str(library)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        wanted |= {found[1] for line in listed.splitlines() if (found := SYMBOL.search(line))}
    if not wanted:
        sys.exit(f"error: {wheel} wants nothing of the Ascend stack; is it a torch_npu?")
    return sorted(wanted)


def text_of_missing(symbols: list[str]) -> str:
    """A weak definition of every symbol: one in our sources takes its place."""
    lines = [
        'extern "C" [[noreturn]] void standin_missing(const char* name);',
        "#define MISSING(name) \\",
        '  extern "C" __attribute__((weak, visibility("default"))) void name() { \\',
        "    standin_missing(#name); \\",
        "  }",
        *(f"MISSING({name})" for name in symbols),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
