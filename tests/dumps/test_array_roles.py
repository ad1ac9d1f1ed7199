"""Names and what they usually mean."""

from one_test import for_each

from nandoctor.dumps.array_roles import is_bookkeeping, is_random_state, role_of

ROLES = {
    "input": """image images img x input inputs input_ids pixel_values attention_mask batch.image inputs.mask image_0 X
        inputImage input_image src samples.3""",
    "target": """mask masks target targets.0.boxes label labels y gt gt_boxes batch.mask target_image y_true image_mask
        teacher_labels""",
    "output": """logit logits outputs.logits pred preds y_hat y_pred out pred_boxes mask_logits outputs.mask
        predicted_mask last_hidden_state logit1""",
    "unknown": """foo loss weight z heat xy yaw my_x checkpoint 7 0.1 outlook imagery""",
}


@for_each([(name, role) for role, names in ROLES.items() for name in names.split()], star=True)
def test_role_of_a_name(name, role):
    assert role_of(name) == role


def test_bookkeeping():
    names = "optimizer optimizer_state_dict optimizerG optim lr_schedulers callbacks rng_state train.rng"
    assert all(map(is_bookkeeping, names.split()))
    assert not any(map(is_bookkeeping, "image optimal_flow schedule_mask orange scaler string".split()))


def test_random_state():
    assert is_random_state("cuda_rng_state")
    assert not is_random_state("optimizer")
    assert not is_random_state("orange")
