"""Reads the files of Granite 4's dense models, whose MLP has the names of a shared expert."""

from typing import ClassVar

from worker.models.families.phi3.checkpoint import FusedFiles


class GraniteDenseFiles(FusedFiles):
    fused: ClassVar = {
        ".shared_mlp.input_linear.": (".mlp.gate_proj.", ".mlp.up_proj."),
        ".shared_mlp.output_linear.": (".mlp.down_proj.",),
    }
