import pytest
import torch

import samples
from eaglefeed.errors import SchemaError
from eaglefeed.schema.batch import Eagle3TargetBackend, Eagle3TargetBatch


def test_trainer_inputs_have_their_names_and_order() -> None:
    batch = Eagle3TargetBatch(**samples.tensors(supervision="logits"))
    order = ["input_ids", "attention_mask", "loss_mask", "aux_hidden_states"]
    assert list(batch.to_trainer_inputs()) == [*order, "target_logits"]
    batch = Eagle3TargetBatch(**samples.tensors())
    assert list(batch.to_trainer_inputs()) == [*order, "target_probs", "position_mask"]
    assert batch.to_trainer_inputs()["target_probs"] is batch.target_probs


def test_packing_features_come_last() -> None:
    packing = {name: torch.zeros(2, 6, dtype=torch.int64) for name in ("position_ids", "seq_lens", "doc_remaining")}
    batch = Eagle3TargetBatch(**samples.tensors(supervision="logits"), **packing)
    assert list(batch.to_trainer_inputs())[-3:] == list(packing)


def test_last_hidden_states_are_an_encoding_that_no_draft_reads() -> None:
    batch = Eagle3TargetBatch(**samples.tensors(supervision="last_hidden_states"), sample_ids=("a",))
    assert list(batch.tensors())[-2:] == ["last_hidden_states", "target_argmax"]
    with pytest.raises(SchemaError, match="a: a draft does not read last hidden states; expand them"):
        batch.to_trainer_inputs()


@pytest.mark.parametrize("change", ["both", "compact", "neither", "half", "packing"])
def test_exactly_one_encoding_and_whole_packing(change: str) -> None:
    features = samples.tensors()
    if change == "both":
        features |= samples.tensors(supervision="logits")
    elif change == "compact":
        features |= samples.tensors(supervision="last_hidden_states")
    elif change == "neither":
        del features["target_probs"], features["position_mask"]
    elif change == "half":
        del features["position_mask"]
    else:
        features["seq_lens"] = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(SchemaError):
        Eagle3TargetBatch(**features)


def test_a_batch_moves_with_its_ids() -> None:
    batch = Eagle3TargetBatch(**samples.tensors(), sample_ids=("a",)).to("meta")
    assert batch.sample_ids == ("a",)
    assert {tensor.device.type for tensor in batch.tensors().values()} == {"meta"}


def test_a_backend_answers_in_place_unless_it_says_otherwise() -> None:
    class Backend(Eagle3TargetBackend):
        def generate_batch(self, input_ids, attention_mask, loss_mask):  # type: ignore[no-untyped-def]
            return Eagle3TargetBatch(**samples.tensors())

        def get_input_embeddings(self):  # type: ignore[no-untyped-def]
            return None

        def set_vocab_mapping(self, selected_token_ids, selected_token_mask):  # type: ignore[no-untyped-def]
            return None

    backend = Backend()
    assert backend.supports_async is False
    with pytest.raises(NotImplementedError, match="generate_batch"):
        backend.generate_batch_async(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    backend.close()
