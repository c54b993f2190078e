"""What a user can get wrong, by kind. Commands print the message; programs catch the class."""


class JaxspecError(ValueError):
    """Base of every error that a user's input, checkpoint or machine can cause."""


class ConfigError(JaxspecError):
    """A `config.json` says something that cannot be honoured; the message names the key."""


class CheckpointError(JaxspecError):
    """A checkpoint is missing, incomplete, damaged or of another kind than asked."""


class RequestError(JaxspecError):
    """The arguments of a decoding call do not make sense for this model."""


class MeshError(JaxspecError):
    """A device mesh does not divide the model; the message names the axis and the sizes."""


class CapacityError(JaxspecError):
    """Something does not fit: weights in device memory, or rows in the page pool."""
