"""The parts of benchmarks.kernels.native_faults."""

import pytest

from benchmarks.kernels.native_faults import FAULTS
from tests.support.kernels.faults import Fault
from tests.support.repository import ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_faults_text_is_in_its_file_once(fault: Fault) -> None:
    assert (ROOT / fault.path).read_text().count(fault.old) == 1
