"""No verb writes over a file of the user's that merely names nandoctor, nor over the code that it runs."""

from click.testing import CliRunner

from nandoctor.cli import main
from nandoctor.views.save import is_replaceable

SAMPLE = "sample_dumps/unet_blank_tile.pth"


def test_a_script_that_imports_nandoctor_is_the_users(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import nandoctor\n")
    assert not is_replaceable(script)
    result = CliRunner().invoke(main, ["repro", SAMPLE, "-o", str(script)])
    assert result.exit_code == 2
    assert script.read_text() == "import nandoctor\n"
