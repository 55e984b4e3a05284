"""Everything that Placewise raises on purpose. Each class carries the exit code that the command line uses."""


class PlacewiseError(Exception):
    """Base class: the message says what is wrong, where, and what to do."""

    exit_code = 1


class InvalidInput(PlacewiseError):
    """A file, graph, cluster, cost table, plan or option is wrong."""

    exit_code = 2


class NoFeasiblePlan(PlacewiseError):
    """No plan was found that keeps every constraint."""

    exit_code = 3


class Unsupported(PlacewiseError):
    """The request is well formed, but this planner or installation cannot serve it."""

    exit_code = 4
