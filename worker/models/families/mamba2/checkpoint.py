"""Reads Mamba-2's files: other names, and layers that are stored as one."""

from worker.models.families.phi3.checkpoint import FusedFiles
from worker.weights.reader import Shape

_NAMES = {
    "backbone.embeddings.weight": "model.embed_tokens.weight",
    "backbone.embedding.weight": "model.embed_tokens.weight",
    "backbone.norm_f.weight": "model.norm.weight",
}
_LAYER, _MIXER = "backbone.layers.", ".mixer."


class Mamba2Files(FusedFiles):
    """Presents the input projection and the convolution as layers of their own: gates z, values x, keys b, queries c,
    steps dt."""

    def _layers(self, stored: str, shapes: dict[str, Shape]) -> dict[str, int] | None:
        num_rows = (*shapes[stored], 1)[0]
        if stored in _NAMES:
            return {_NAMES[stored]: num_rows}
        if not stored.startswith(_LAYER):
            return None
        name = f"model.layers.{stored.removeprefix(_LAYER)}"
        prefix, _, tensor = name.partition(_MIXER)
        if not tensor:
            return {name.replace(".norm.", ".input_layernorm."): num_rows}
        kind = tensor.rpartition(".")[2]
        parts = self._parts_of(tensor, f"{stored.partition(_MIXER)[0]}{_MIXER}", shapes)
        return {f"{prefix}{_MIXER}{part}.{kind}": rows for part, rows in parts.items()} or {name: num_rows}

    def _parts_of(self, tensor: str, prefix: str, shapes: dict[str, Shape]) -> dict[str, int]:
        """Returns the layers that a stored one consists of, and their outputs; empty: it is one layer."""
        values, steps = (shapes.get(f"{prefix}{name}", (0,))[0] for name in ("norm.weight", "A_log"))
        channels = shapes.get(f"{prefix}conv1d.weight", (0,))[0]
        keys = (channels - values) // 2
        if tensor.startswith("in_proj."):
            return {"z_proj": values, "x_proj": values, "b_proj": keys, "c_proj": keys, "dt_proj": steps}
        if tensor.startswith("conv1d."):
            return {"x_conv": values, "b_conv": keys, "c_conv": keys}
        return {}
