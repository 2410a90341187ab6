"""The --target flag, by which commands name routers."""

import pytest
import typer

from octavo.cli.flags import separate


def test_several_targets_come_in_one_flag_or_in_several() -> None:
    assert separate(["a:1,b:2", "c:3"]) == separate(["a:1", "b:2 , c:3,"]) == ["a:1", "b:2", "c:3"]
    with pytest.raises(typer.BadParameter, match="--target is empty"):
        separate([","])
