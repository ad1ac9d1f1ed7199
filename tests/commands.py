"""Commands run in this process, and what they print."""

from click.testing import CliRunner

from nandoctor.cli import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def words(text):
    """The text without its line breaks."""
    return " ".join(text.split())
