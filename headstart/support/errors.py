"""The user's mistakes, reported in one line."""


class UserError(ValueError):
    """Bad input: the message is one line that says what was found, what is allowed and what to do.

    Commands print it as ``error: ...`` and exit with status 2; Python callers get it as the ``ValueError`` it is.
    """
