"""Why a grader gave no reward. Torch-free, and without pydantic: the zygote imports it."""


class GradeFailure(Exception):
    """A grade that could not be made; becomes a `Grade` without a reward."""

    def __init__(self, error_type: str, message: str) -> None:
        """`error_type` is OpenAI's name of the error, such as `invalid_variable_error`."""
        super().__init__(message)
        self.error_type = error_type
