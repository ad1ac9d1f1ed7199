"""What an error says can be printed anywhere, whatever a file or a model put into it."""

from nandoctor.errors import ModelError


def test_an_error_writes_out_what_is_not_visible():
    error = ModelError("Net has no \x00\x1b[31m\u202e.\nBeside it:\ta", remedy="Name \ud800.")
    assert error.message == "Net has no \\x00\\x1b[31m\\u202e.\nBeside it:\\ta"
    assert str(error).splitlines()[-1] == "Name \\ud800."
    assert error.args == (error.message,)
