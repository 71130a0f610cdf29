"""Where tensor and expert parallelism cut DeepSeek-V3. Data only, in the words of Llama 3's plan and two more.

  replicate   weight on every rank; works on the whole (B, T, ...) that the module around it gathered
  experts     stacked weights cut by experts among the ep ranks; each rank sends the tokens of its (B, T/tp, D) to the
              experts' ranks and gets them back. tp does not cut them: its ranks are data-parallel ranks to the experts

The router works on (B, T/tp, D) as the norms do, and the shared experts are a feed-forward like any other, so between
its norm and the sum with the residual an MoE block never holds a sequence whole but for the shared experts.
"""

from __future__ import annotations

from titan_cli.models.llama3.tp_plan import CUT_DIM as DENSE_CUT_DIM

TP_PLAN = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    # Heads are cut. What makes the latents is narrow and shared by all heads, so every rank computes the whole of it.
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wq_a": "replicate",
    "layers.*.attention.q_norm": "replicate",
    "layers.*.attention.wq_b": "colwise",
    "layers.*.attention.wkv_a": "replicate",
    "layers.*.attention.kv_norm": "replicate",
    "layers.*.attention.wkv_b": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "layers.*.moe.router.gate": "sequence",
    "layers.*.moe.experts": "experts",
    "layers.*.moe.shared_experts": "gather",
    "layers.*.moe.shared_experts.w1": "colwise",
    "layers.*.moe.shared_experts.w3": "colwise",
    "layers.*.moe.shared_experts.w2": "rowwise",
    "norm": "sequence",
    "output": "head",
}

# The weight dimension that each style cuts; None: the whole weight is on every rank.
CUT_DIM = DENSE_CUT_DIM | {"replicate": None, "experts": 0}
