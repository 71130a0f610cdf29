"""Where tensor parallelism cuts Llama 3. Data only: the worker turns it into torch's styles, the fit into bytes.

`*` stands for every block. Between the blocks lies (B, T/tp, D), cut along the sequence, or with sequence_parallel=false
the whole (B, T, D) on every rank. The styles ("reduced": reduce-scattered to the cut, or all-reduced to the whole one):
  embedding   weight cut by vocabulary rows; output reduced
  colwise     weight cut by output features; input gathered, or taken whole, by the module that holds it
  rowwise     weight cut by input features; output reduced
  sequence    weight on every rank; works on what lies between the blocks
  gather      no weight; gathers its input to (B, T, D) once for the colwise modules inside, if it is not whole already
  head        weight cut by vocabulary rows; input gathered; logits whole on every rank, or with loss_parallel=true its own
              columns (B, T, V/tp)
"""

from __future__ import annotations

TP_PLAN = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "sequence",
    "output": "head",
}

# The weight dimension that each style cuts; None: the whole weight is on every rank.
CUT_DIM = {"embedding": 0, "colwise": 0, "head": 0, "rowwise": 1, "sequence": None, "gather": None}
