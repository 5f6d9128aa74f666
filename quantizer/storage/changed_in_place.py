"""The error of code that changes a tensor whose values are in a file."""


class ChangedInPlaceError(RuntimeError):
    """Code has tried to change a deferred tensor, such as the weight of a layer, in place."""
