"""The house rules, enforced: who may import whom, how long things may be, what never appears.

The table of rooms below is the one of the design. A module that no line of it matches fails a test:
whoever adds a room decides here, in the open, on which floor it stands.
"""

from __future__ import annotations

import ast
import functools
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierkv

ROOT = Path(tierkv.__file__).parent
TESTS = Path(__file__).parent
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500
LINE_MAX = 100
PUBLIC_NAMES_MAX = 7

# Module or package (by prefix, the longest wins) -> floor. A module imports its own floor or lower.
FLOORS = {
    "tierkv": 0,  # __init__: names of errors only
    "tierkv.types": 0,
    "tierkv.errors": 0,
    "tierkv.hashing": 0,
    "tierkv.units": 0,
    "tierkv.core": 1,
    "tierkv.service": 1,  # __init__: a docstring
    "tierkv.service.wire": 1,
    "tierkv.service.breaker": 1,
    "tierkv.numa": 1,
    "tierkv.host_facts": 1,
    "tierkv.pool": 1,
    "tierkv.mapper": 1,
    "tierkv.config": 1,
    "tierkv.plugins": 1,
    "tierkv.sizing": 1,
    "tierkv.tiers": 2,
    "tierkv.tiers.base": 1,
    "tierkv.tiers.frame": 1,
    "tierkv.service.io_process": 2,
    "tierkv.service.io_wire": 2,
    "tierkv.service.connection": 2,
    "tierkv.service.answers": 1,
    "tierkv.service.client": 2,
    "tierkv.device": 2,
    "tierkv.device.facts": 1,
    "tierkv.testing": 2,
    "tierkv.service.server": 3,
    "tierkv.service.stats": 3,
    "tierkv.service.tier_host": 3,
    "tierkv.service.daemon": 3,
    "tierkv.service.launcher": 3,
    "tierkv.sdk": 3,
    "tierkv.connectors": 4,
    "tierkv.cli": 4,
    "tierkv.bench": 4,
}
# Packages whose every module must be placed by name, because its modules stand on several floors.
MIXED = {"tierkv", "tierkv.service"}

# Foreign module -> the only rooms that may import it, anywhere in a file.
ONLY_IN = {
    "torch": ("tierkv.device", "tierkv.sdk", "tierkv.connectors", "tierkv.bench"),
    # The bare peer of `bench rpc` is what an empty round trip is compared with.
    "zmq": ("tierkv.service", "tierkv.bench.rpc", "tierkv.bench.echo"),
    "pydantic": ("tierkv.config",),
    "yaml": ("tierkv.config", "tierkv.cli", "tierkv.bench"),
    # The demonstration starts real engines, in processes of its own.
    "vllm": ("tierkv.connectors.vllm", "tierkv.bench.demo"),
    # The reference of `bench copy` moves its pages in a thread, as the copy engine does;
    # `bench device` passes an event to those who prefault and register a pool.
    "threading": (
        "tierkv.sdk",  # one lock
        "tierkv.pool",
        "tierkv.mapper",
        "tierkv.device",
        "tierkv.service.io_process",
        "tierkv.tiers",  # locks only; a test below says so
        "tierkv.testing",  # the contract suite calls tiers from many threads
        "tierkv.bench.copy",
        "tierkv.bench.device_stage",
    ),
    "_thread": (),
    "concurrent.futures": (
        "tierkv.device",
        "tierkv.service.io_process",
        "tierkv.bench.fs_stage",  # as many threads on both sides of a comparison
    ),
    "multiprocessing": (),  # its resource tracker unlinks shared memory of others
    "pickle": (),
    "marshal": (),
    "shelve": (),
    "dill": (),
    "cloudpickle": (),
}
STARTS_THREADS = (
    "tierkv.pool",
    "tierkv.mapper",
    "tierkv.device",
    "tierkv.service.io_process",
    "tierkv.bench",
    "tierkv.testing",
)
# No clock below serve(): time is an argument. The core is pure besides.
TIMELESS = ("tierkv.core", "tierkv.service.server", "tierkv.service.breaker")
CORE_MAY_USE = ("tierkv.core", "tierkv.types", "tierkv.errors", "tierkv.hashing", "tierkv.units")
CORE_FOREIGN = {"numpy", "collections", "dataclasses", "enum", "typing", "itertools", "functools"}
CORE_FOREIGN |= {"__future__", "math", "heapq", "bisect", "abc"}
# The demonstration sets vLLM's own variables in the processes that it starts.
READS_ENVIRONMENT = ("tierkv.config", "tierkv.service.launcher", "tierkv.bench.demo.engine")
# Where code of others is called that may raise anything: a store's client, a package's import.
FOREIGN_BORDER = ("tierkv.service.io_process", "tierkv.plugins")
MAY_PRINT = ("tierkv.cli", "tierkv.bench")


def name_of(path: Path) -> str:
    """Dotted name of a module file."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def is_in(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


def floor_of(name: str) -> int | None:
    room = name
    while room not in FLOORS:
        room = room.rpartition(".")[0]
    return None if room in MIXED and room != name else FLOORS[room]


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    }


def walk(node: ast.AST, with_functions: bool) -> Iterator[ast.AST]:
    """All nodes below, without what only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if is_for_types_only(child):
            yield from (n for part in child.orelse for n in [part, *walk(part, with_functions)])
            continue
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield child
        if with_functions or not is_function:
            yield from walk(child, with_functions)


def imports_of(name: str, with_functions: bool = True) -> set[str]:
    """Names that a module imports when it runs; `from a import b` counts as a and, if one, a.b."""
    found = set()
    for node in walk(tree_of(name), with_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            below = {f"{base}.{alias.name}" for alias in node.names}
            modules = {m for m in below if m in MODULES or is_in(m, tuple(ONLY_IN))}
            # A package of ours that is only the way to its module is not itself a dependency.
            if base not in MODULES or below - modules:
                found.add(base)
            found |= modules
    return found


def own(names: set[str]) -> set[str]:
    return {name for name in names if is_in(name, ("tierkv",))}


def calls_of(name: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def here(name: str, node: ast.AST | int) -> str:
    line = node if isinstance(node, int) else node.lineno
    return f"{MODULES[name].relative_to(ROOT.parent)}:{line}"


every_module = pytest.mark.parametrize("name", sorted(MODULES))


# ---- imports -----------------------------------------------------------------------------------


@every_module
def test_a_module_stands_on_a_floor(name):
    assert floor_of(name) is not None, f"place {name} in FLOORS: on which floor does it stand?"


@every_module
def test_imports_go_one_way(name):
    floor = floor_of(name) or 0
    upward = [used for used in sorted(own(imports_of(name))) if (floor_of(used) or 0) > floor]
    assert upward == [], f"{name} stands on floor {floor}"


@every_module
def test_a_foreign_module_is_imported_only_where_it_belongs(name):
    wrong = [
        f"{name} imports {used}"
        for used in sorted(imports_of(name))
        for foreign, rooms in ONLY_IN.items()
        if is_in(used, (foreign,)) and not is_in(name, rooms)
    ]
    assert wrong == []


@every_module
def test_threads_are_started_only_where_they_belong(name):
    """Others may hold locks, because they are called from threads."""
    starts = {"threading.Thread", "Thread", "ThreadPoolExecutor", "threading.Timer"}
    found = [here(name, call) for text, call in calls_of(name) if text in starts]
    assert found == [] or is_in(name, STARTS_THREADS)


@pytest.mark.parametrize("name", [n for n in sorted(MODULES) if is_in(n, ("tierkv.core",))])
def test_the_core_is_pure(name):
    """No socket, file, thread, clock, tensor or configuration object."""
    used = imports_of(name)
    assert [n for n in sorted(own(used)) if not is_in(n, CORE_MAY_USE)] == []
    assert {n.partition(".")[0] for n in used - own(used)} - CORE_FOREIGN == set()
    assert [here(name, call) for text, call in calls_of(name) if text in {"open", "input"}] == []


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: own(imports_of(name, with_functions=False)) & set(MODULES) for name in MODULES}
    while True:
        leaves = [name for name, used in graph.items() if not used & set(graph)]
        if not leaves:
            break
        for name in leaves:
            del graph[name]
    assert {name: sorted(used & set(graph)) for name, used in graph.items()} == {}


def reached_from(name: str) -> set[str]:
    """Everything that running a module may import, late imports included."""
    seen, todo = set(), [name]
    while todo:
        for used in imports_of(todo.pop()):
            if used not in seen:
                seen.add(used)
                todo += [used] if used in MODULES else []
    return seen


def test_the_daemon_never_imports_torch_or_vllm():
    heavy = [n for n in reached_from("tierkv.service.daemon") if is_in(n, ("torch", "vllm"))]
    assert heavy == []


def loaded_by(statement: str) -> tuple[set[str], float]:
    """Modules that a new interpreter has after a statement, and the milliseconds it took."""
    text = (
        "import sys, time; start = time.perf_counter()\n"
        f"{statement}\n"
        "print((time.perf_counter() - start) * 1000, *sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    took, *modules = out.stdout.split()
    return set(modules), float(took)


def test_importing_the_package_loads_nothing_heavy():
    runs = [loaded_by("import tierkv") for _ in range(5)]
    print(f"import tierkv: median {statistics.median(took for _, took in runs):.1f} ms of 5")
    for modules, _ in runs:
        assert "tierkv" in modules
        assert modules & {"torch", "zmq", "vllm", "pydantic", "numpy"} == set()


def test_importing_the_daemon_loads_no_torch():
    modules, _ = loaded_by("import tierkv.service.daemon")
    assert modules & {"torch", "vllm", "transformers"} == set()


# ---- size --------------------------------------------------------------------------------------


@every_module
def test_a_file_is_not_too_long(name):
    lines = MODULES[name].read_text(encoding="utf-8").count("\n")
    assert lines <= FILE_LINES_MAX, f"{here(name, 1)} has {lines} lines"


@every_module
def test_no_line_is_too_long(name):
    lines = MODULES[name].read_text(encoding="utf-8").splitlines()
    assert [here(name, n) for n, line in enumerate(lines, 1) if len(line) > LINE_MAX] == []


@every_module
def test_no_function_is_too_long(name):
    found = [
        f"{here(name, node)} {node.name}"
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert found == []


# Collections of small names that belong together; splitting them would make them harder to find.
MANY_NAMES = {
    "tierkv.types",  # the words of the design
    "tierkv.errors",  # one class per kind of trouble
    "tierkv.service.wire",  # one class per message
    "tierkv.units",  # parse and format per unit
    "tierkv.connectors.vllm.compat",  # one question per difference between releases
    "tierkv.numa",  # what is asked of the kernel, and what it answers
    "tierkv.pool",  # the file, its locks and those who take them rest on the same few lines
    "tierkv.config.models",  # one class per group of keys
    "tierkv.config.load",  # files, trees and keys of one configuration
    "tierkv.core.values",  # the values that cross the core's border
    "tierkv.service.io_wire",  # one class per message
}

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_of(body: list[ast.stmt]) -> list[Definition]:
    return [n for n in body if isinstance(n, Definition) and not n.name.startswith("_")]


@every_module
def test_a_module_has_few_public_names(name):
    if name not in MANY_NAMES:
        names = [node.name for node in public_of(tree_of(name).body)]
        assert len(names) <= PUBLIC_NAMES_MAX, f"{name} has {len(names)}: {names}"


# ---- docstrings --------------------------------------------------------------------------------


def is_property(node: ast.AST) -> bool:
    names = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(n.endswith(("property", ".setter", ".getter")) for n in names)


def is_documented_elsewhere(method: Definition, owner: ast.ClassDef) -> bool:
    """Whether the method fills in a contract whose own method says what it does.

    Contracts are protocols and abstract classes, ours in any module and vLLM's in the connector.
    """
    for name in MODULES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.ClassDef) and node is not owner:
                bases = {ast.unparse(base) for base in node.bases}
                is_contract = bases & {"Protocol", "ABC", "abc.ABC", "typing.Protocol"}
                is_base = node.name in {ast.unparse(base) for base in owner.bases}
                named = [m for m in public_of(node.body) if m.name == method.name]
                if (is_contract or is_base) and any(map(ast.get_docstring, named)):
                    return True
    # Overrides of what a foreign class documents: vLLM's connector, click's group.
    return any(ast.unparse(base).startswith(("KVConnector", "click.")) for base in owner.bases)


MESSAGES = ("tierkv.service.wire", "tierkv.service.io_wire")


def undocumented(name: str) -> Iterator[str]:
    tree = tree_of(name)
    if not ast.get_docstring(tree):
        yield f"{here(name, 1)} module {name}"
    for node in public_of(tree.body):
        # A message is its fields; their names say all there is, and some have more to say.
        is_message = name in MESSAGES and isinstance(node, ast.ClassDef)
        if not ast.get_docstring(node) and not is_message:
            yield f"{here(name, node)} {node.name}"
        if not isinstance(node, ast.ClassDef):
            continue
        for method in public_of(node.body):
            # A property reads as a fact, and its name tells it.
            if ast.get_docstring(method) or is_property(method):
                continue
            if not is_documented_elsewhere(method, node):
                yield f"{here(name, method)} {node.name}.{method.name}"


@every_module
def test_every_public_name_says_what_it_does(name):
    assert list(undocumented(name)) == []


# ---- what never appears ------------------------------------------------------------------------


@every_module
def test_no_error_is_caught_without_knowing_it(name):
    """`except Exception` belongs to the border with code of others and nowhere else."""
    found = [
        here(name, node)
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or {"Exception", "BaseException"}
            & {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
        )
    ]
    found += [
        here(name, call)
        for text, call in calls_of(name)
        if text.endswith("suppress")
        and {ast.unparse(a) for a in call.args} & {"Exception", "BaseException"}
    ]
    assert found == [] or is_in(name, FOREIGN_BORDER)


@every_module
def test_nothing_is_printed_but_by_commands(name):
    if not is_in(name, MAY_PRINT):
        found = [
            here(name, call)
            for text, call in calls_of(name)
            if text in {"print", "pprint", "sys.stdout.write", "sys.stderr.write"}
        ]
        assert found == []


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load"}


@every_module
def test_nothing_is_executed_that_came_from_outside(name):
    found = [
        f"{here(name, call)} {text}"
        for text, call in calls_of(name)
        if text in FORBIDDEN_CALLS
        or text.startswith(("pickle.", "marshal."))
        or any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in call.keywords)
        or any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in call.keywords)
    ]
    assert found == []


@every_module
def test_no_promise_is_left_in_a_comment(name):
    with MODULES[name].open("rb") as file:
        found = [
            here(name, token.start[0])
            for token in tokenize.tokenize(file.readline)
            if token.type in {tokenize.COMMENT, tokenize.STRING}
            and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string)
        ]
    assert found == []


@every_module
def test_the_environment_is_read_only_where_settings_are_made(name):
    if not is_in(name, READS_ENVIRONMENT):
        found = [
            here(name, node)
            for node in ast.walk(tree_of(name))
            if (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"})
            or (isinstance(node, ast.alias) and node.name in {"environ", "environb", "getenv"})
        ]
        assert found == []


@pytest.mark.parametrize("name", [n for n in sorted(MODULES) if is_in(n, TIMELESS)])
def test_time_is_an_argument(name):
    assert imports_of(name) & {"time", "datetime", "sched"} == set()
    assert [here(name, c) for text, c in calls_of(name) if text.startswith("time.")] == []


@every_module
def test_log_lines_are_put_together_by_the_logger(name):
    """An f-string is built even when nobody listens."""
    levels = {"debug", "info", "warning", "error", "exception", "critical"}
    found = [
        here(name, call)
        for text, call in calls_of(name)
        if text.rpartition(".")[0] in {"logger", "logging", "log"}
        and text.rpartition(".")[2] in levels
        and call.args
        and isinstance(call.args[0], ast.JoinedStr | ast.BinOp)
    ]
    assert found == []


# ---- the tests themselves ----------------------------------------------------------------------


def test_every_mark_is_a_registered_one(pytestconfig):
    """A mark nobody knows selects nothing, and `xfail` would hide what is broken."""
    known = {re.split(r"[(:]", line)[0].strip() for line in pytestconfig.getini("markers")}
    assert "vllm" in known
    known -= {"xfail"}
    used = {
        (path.name, node.attr)
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
    }
    assert {(file, mark) for file, mark in used if mark not in known} == set()


def test_no_test_sleeps_or_mocks():
    found = [
        f"{path.name}:{node.lineno}"
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "sleep"})
        or (isinstance(node, ast.Import) and any("mock" in alias.name for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and "mock" in (node.module or ""))
    ]
    assert found == []


def test_these_rules_see_what_they_forbid(tmp_path, monkeypatch):
    """The negative control: a module that breaks rules is found to break them."""
    path = tmp_path / "bad.py"
    path.write_text(
        "import pickle, torch\nfrom tierkv.service import daemon\n"
        "def f():\n    from tierkv.cli import main\n    try:\n        print(eval('1'))\n"
        "    except Exception:\n        pass  # TODO\n"
    )
    monkeypatch.setitem(MODULES, "tierkv.core.bad", path)
    monkeypatch.setattr(sys.modules[__name__], "here", lambda name, node: name)
    tree_of.cache_clear()
    try:
        for rule in (
            test_imports_go_one_way,
            test_a_foreign_module_is_imported_only_where_it_belongs,
            test_the_core_is_pure,
            test_every_public_name_says_what_it_does,
            test_no_error_is_caught_without_knowing_it,
            test_nothing_is_printed_but_by_commands,
            test_nothing_is_executed_that_came_from_outside,
            test_no_promise_is_left_in_a_comment,
        ):
            with pytest.raises(AssertionError):
                rule("tierkv.core.bad")
    finally:
        tree_of.cache_clear()
