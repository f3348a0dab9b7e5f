"""The one error that means: the input is at fault, not the program."""


class InputError(ValueError):
    """Says that a file, flag or argument cannot be used as given.

    The message is one line that names the culprit, what was expected and what to do: a
    library's names the argument, a binary's the flag. Binaries print it and exit with
    status 2; a traceback would add nothing.
    """
