"""What a pass of a model consists of, from its header: so much is known of how soon it can be interrupted."""

from __future__ import annotations

from edgeinfer.gguf_file.header import Header
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.scheduling.operations import Work
from edgeinfer.types import Placement

_ATTENTION_OUTPUT = ".attn_output.weight"


def pass_work(header: Header, placement: Placement) -> Work | None:
    """The multiply-adds of a token; None with layers on a GPU, which looks for no interrupt before a pass is over.

    The attention's are counted by its output, a row of which has an element for each of those of a value; keys are
    taken to be as long. Raises what `read_shards` does.
    """
    if placement.gpu_layers:
        return None
    used_experts = header.hyperparameter("expert_used_count", 0)
    matrices, heads = [0], [0]
    for tensor in (tensor for part in read_shards(header) for tensor in part.tensors):
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            uses = used_experts if "_exps." in tensor.name else 1
            matrices.append(tensor.shape[0] * tensor.shape[1] * uses)
            if tensor.name.endswith(_ATTENTION_OUTPUT):
                heads.append(tensor.shape[0])
    return Work(sum(matrices), max(matrices), attended=2 * max(heads), n_layers=len(heads) - 1)
