"""Names of every program of the study, as tracing gives them, and what they are to the model."""

from __future__ import annotations

import pytest

from footprints import footprint
from smaragdine.study.roles import operations, over_layers, role_of

HF, HF_ALBERT = "BertForPreTraining", "AlbertForPreTraining"
SHARED = f"{HF_ALBERT}/albert/encoder/albert_layer_groups/0/albert_layers/0"
SELF, AFTER = "attention/self", "attention/output"


@pytest.mark.parametrize(
    ("name", "part", "layer", "block", "kind"),
    [
        # Hugging Face in PyTorch
        (f"{HF}/bert/embeddings/word_embeddings/embedding", "embeddings", None, None, "other"),
        (f"{HF}/bert/encoder/layer/0/attention/self/query/addmm", "encoder", 0, SELF, "product"),
        (f"{HF}/bert/encoder/layer/11/attention/self/bmm", "encoder", 11, SELF, "product"),
        (f"{HF}/bert/encoder/layer/3/attention/self/_softmax", "encoder", 3, SELF, "other"),
        (f"{HF}/bert/encoder/layer/3/attention/output/dense/mm", "encoder", 3, AFTER, "product"),
        (
            f"{HF}/bert/encoder/layer/3/attention/output/LayerNorm/native_layer_norm",
            "encoder",
            3,
            AFTER,
            "other",
        ),
        (f"{HF}/bert/encoder/layer/3/intermediate/dense/addmm", "encoder", 3, "intermediate", "product"),
        (
            f"{HF}/bert/encoder/layer/3/intermediate/intermediate_act_fn/gelu",
            "encoder",
            3,
            "intermediate",
            "other",
        ),
        (f"{HF}/bert/encoder/layer/3/output/dense/addmm", "encoder", 3, "output", "product"),
        (
            f"{HF}/bert/encoder/layer/3/attention/self/_scaled_dot_product_efficient_attention",
            *("encoder", 3, SELF, "product"),
        ),
        (f"{HF}/bert/encoder/layer/*/output/dense/addmm", "encoder", None, "output", "product"),
        (f"{HF}/bert/pooler/dense/addmm", "pooler", None, None, "product"),
        (f"{HF}/bert/rsub", "other", None, None, "other"),  # the mask
        (f"{HF}/cls/predictions/decoder/addmm", "heads", None, None, "product"),
        (f"{HF}/cross_entropy_loss", "heads", None, None, "other"),
        ("BertForSequenceClassification/classifier/addmm", "heads", None, None, "product"),
        ("optimizer/AdamW/_fused_adamw_", "optimizer", None, None, "other"),
        ("program/nll_loss_backward", "other", None, None, "other"),
        ("framework/copy_", "other", None, None, "other"),
        ("unplaced/mm", "other", None, None, "product"),
        # Hugging Face's ALBERT
        (f"{HF_ALBERT}/albert/encoder/embedding_hidden_mapping_in/addmm", "encoder", None, None, "product"),
        (f"{SHARED}/attention/query/addmm", "encoder", None, SELF, "product"),
        (f"{SHARED}/attention/bmm", "encoder", None, SELF, "product"),
        (f"{SHARED}/attention/attention_dropout/native_dropout", "encoder", None, SELF, "other"),
        (f"{SHARED}/attention/dense/addmm", "encoder", None, AFTER, "product"),
        (f"{SHARED}/attention/LayerNorm/native_layer_norm", "encoder", None, AFTER, "other"),
        (f"{SHARED}/ffn/addmm", "encoder", None, "intermediate", "product"),
        (f"{SHARED}/activation/tanh", "encoder", None, "intermediate", "other"),
        (f"{SHARED}/ffn_output/addmm", "encoder", None, "output", "product"),
        (f"{SHARED}/full_layer_layer_norm/native_layer_norm", "encoder", None, "output", "other"),
        (f"{HF_ALBERT}/albert/pooler/addmm", "pooler", None, None, "product"),
        (f"{HF_ALBERT}/albert/pooler_activation/tanh", "pooler", None, None, "other"),
        (f"{HF_ALBERT}/predictions/decoder/addmm", "heads", None, None, "product"),
        (f"{HF_ALBERT}/sop_classifier/classifier/addmm", "heads", None, None, "product"),
        # Keras on TensorFlow, JAX and PyTorch, and TensorFlow 1
        ("bert/embeddings/LayerNorm/batchnorm/mul", "embeddings", None, None, "other"),
        ("bert/encoder/layer_0/attention/self/query/MatMul", "encoder", 0, SELF, "product"),
        ("bert/encoder/layer_0/attention/self/query/MatMul/MatMul_1", "encoder", 0, SELF, "product"),
        ("bert/encoder/layer_0/attention/self/MatMul_1/BatchMatMulV2", "encoder", 0, SELF, "product"),
        (
            "bert/encoder/layer_0/attention/self/ArithmeticOptimizer/FoldTransposeIntoMatMul_MatMul",
            *("encoder", 0, SELF, "product"),
        ),
        ("bert/encoder/layer_10/attention/self/Softmax", "encoder", 10, SELF, "other"),
        ("bert/encoder/layer_10/attention/output/dense/FusedMatMul", "encoder", 10, AFTER, "product"),
        ("bert/encoder/layer_10/attention/output/dense/BiasAdd", "encoder", 10, AFTER, "other"),
        ("bert/encoder/layer_2/intermediate/dense/dot_general", "encoder", 2, "intermediate", "product"),
        ("bert/encoder/layer_2/output/dense/MatMul/MatMul", "encoder", 2, "output", "product"),
        ("bert/encoder/layer_*/output/dense/MatMul", "encoder", None, "output", "product"),
        ("bert/encoder/layer_2/add", "encoder", 2, None, "other"),
        ("bert/encoder/Reshape", "encoder", None, None, "other"),
        ("bert/pooler/dense/MatMul", "pooler", None, None, "product"),
        ("bert/cls/predictions/MatMul", "heads", None, None, "product"),
        ("cls/predictions/transform/dense/MatMul", "heads", None, None, "product"),
        ("loss/Mean", "heads", None, None, "other"),
        ("program/compile_loss/Mean", "other", None, None, "other"),
        ("MatMul", "other", None, None, "product"),
        # an einsum, called itself or made of other products
        ("albert/encoder/layer_shared/attention/self/query/einsum/Einsum", "encoder", None, SELF, "einsum"),
        ("albert/encoder/layer_shared_3/ffn/einsum/Einsum_1", "encoder", None, "intermediate", "einsum"),
        ("albert/encoder/layer/attention/self/einsum/bmm", "encoder", None, SELF, "einsum"),
        # the reference's own scopes
        (
            "bert/encoder/transformer/group_0/inner_group_0/attention_1/output/dense/einsum/Einsum",
            *("encoder", None, AFTER, "einsum"),
        ),
        (
            "bert/encoder/transformer/group_0/inner_group_0/ffn_1/intermediate/dense/einsum/Einsum",
            *("encoder", None, "intermediate", "einsum"),
        ),
        (
            "bert/encoder/transformer/group_0/inner_group_0/ffn_1/intermediate/output/dense/einsum/Einsum",
            *("encoder", None, "output", "einsum"),
        ),
    ],
)
def test_roles(name: str, part: str, layer: int | None, block: str | None, kind: str) -> None:
    role = role_of(name)
    assert (role.part, role.layer, role.block, role.kind) == (part, layer, block, kind)
    assert role.operation == name.rsplit("/", 1)[-1]


PRODUCTS = """
    mm addmm bmm baddbmm matmul linear linear_backward mkldnn_linear _addmm_activation _scaled_mm
    dot dot_general tensordot MatMul MatMul_12 BatchMatMul BatchMatMulV2 FusedMatMul FusedBatchMatMulV2
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu_backward
    _efficient_attention_backward
"""


@pytest.mark.parametrize("operation", PRODUCTS.split())
def test_matrix_products(operation: str) -> None:
    assert role_of(f"model/{operation}").kind == "product"


@pytest.mark.parametrize(
    "operation", ["add", "gelu", "mul", "BiasAdd", "_softmax", "dropout", "MatMulish", "comma", "transpose_1"]
)
def test_others(operation: str) -> None:
    assert role_of(f"model/{operation}").kind == "other"


def test_operations_of_one_device() -> None:
    made = footprint(
        [
            {"name": f"{HF}/bert/encoder/layer/1/output/dense/addmm", "phase": "forward", "energy_j": 3.0},
            {"name": f"{HF}/bert/encoder/layer/1/output/dense/addmm", "phase": "backward", "energy_j": 5.0},
            {"name": f"{HF}/bert/encoder/layer/1/attention/self/mul", "phase": "forward", "energy_j": 1.0},
            # in the layer's scope, but the optimizer's
            {"name": f"{HF}/bert/encoder/layer/1/attention/self/mul", "phase": "optimizer", "energy_j": 2.0},
            {"name": "input/copy_", "energy_j": 9.0, "device": "cpu:0"},
        ]
    )
    found = operations(made, "gpu:0")
    assert found.energy_j.tolist() == [5.0, 3.0, 2.0, 1.0]
    assert found.part.tolist() == ["encoder", "encoder", "optimizer", "encoder"]
    assert found.layer.tolist() == [1, 1, 1, 1]
    assert found.product.tolist() == [True, True, False, False]
    assert found.attention.tolist() == [False, False, True, True]
    assert found.sum_j(found.product & found.of("forward")) == 3.0
    assert found.top(2).tolist() == [0, 1]


@pytest.mark.parametrize("layer", ["layer_{}", "layer/{}"])
@pytest.mark.parametrize("layers", [1, 12])
def test_summed_over_layers_that_are_not_alike(layer: str, layers: int) -> None:
    names = [f"bert/encoder/{layer.format(n)}/attention/self/key/MatMul" for n in range(layers)]
    rows = [{"name": name, "energy_j": 2.0} for name in names]
    rows.append(
        {"name": f"bert/encoder/{layer.format(0)}/output/Cast", "energy_j": 1.0}
    )  # in the first alone
    found = operations(over_layers(footprint(rows)), "gpu:0")
    above = layer.format("*")
    assert found.name == (
        f"bert/encoder/{above}/attention/self/key/MatMul",
        f"bert/encoder/{above}/output/Cast",
    )
    assert (found.energy_j.tolist(), found.layer.tolist()) == ([2.0 * layers, 1.0], [-1, -1])
    assert found.block.tolist() == ["attention/self", "output"]
