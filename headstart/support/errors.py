"""User errors, reported in one line."""


class UserError(ValueError):
    """Invalid input. The message is one line with the value, the allowed values and a remedy.

    Commands print it as ``error: ...`` and exit with status 2; Python callers may catch it as a ``ValueError``.
    """
