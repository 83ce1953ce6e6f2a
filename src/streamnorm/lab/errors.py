"""What can go wrong for a user: one line with the value, the rule and the fix. The command line ends with code 2."""


class LabError(RuntimeError):
    """Base of all of them."""


class DataError(LabError):
    """The data cannot be had."""


class DeviceError(LabError):
    """A device is not there."""


class StoreError(LabError):
    """A folder or file of results cannot be used."""


class BusyError(StoreError):
    """A run is being trained by another process."""


class JobError(LabError):
    """A run ended otherwise than by its own rules."""


class MissingExtra(LabError):
    """A package that only some commands need is not installed."""
