"""Commands run in this process, and what they print."""

from click.testing import CliRunner

from nandoctor.cli import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def words(text):
    return " ".join(text.split())
