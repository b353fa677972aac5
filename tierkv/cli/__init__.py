"""The ``tierkv`` command. Each command is a module of its own, loaded when it is called."""
