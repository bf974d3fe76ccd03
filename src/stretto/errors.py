"""The one error that stretto raises for what a user can put right."""


class StrettoError(ValueError):
    """Something given to stretto does not fit.

    Messages read `<what was expected>, got <what came>. <what to do>.`, after `<file>:<line>: ` where the
    fault is in a file. The command line prints the message alone; any other exception is a bug and keeps
    its traceback.
    """
