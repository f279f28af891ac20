"""An SGLang engine of the tests: replies of the form that SGLang 0.5.23 gave, with a tiny model inside."""

from typing import Any

import torch

__all__ = ["Engine"]


class Engine:
    """Captures outputs of layers in ascending order, as nested lists, and says a token and its log probability.

    Answers come in the order of `reorder`: the last one first.
    """

    def __init__(self, model: Any, layers: list[int]) -> None:
        self.model, self.layers = model, sorted(layers)
        self.prompts: list[list[int]] = []
        self.keep: slice = slice(None)
        self.reorder: Any = lambda answers: answers[::-1]
        self.bias, self.is_down = 0.0, False

    def generate(
        self,
        *,
        input_ids: Any,
        rid: Any,
        sampling_params: Any,
        return_hidden_states: bool,
        return_logprob: bool = False,
    ) -> Any:
        assert (sampling_params["max_new_tokens"], sampling_params["temperature"]) == (1, 0)
        assert return_hidden_states
        if self.is_down:
            raise RuntimeError("scheduler is gone")
        self.prompts += input_ids
        answers = [{"meta_info": {"id": name} | self.answer(ids)} for name, ids in zip(rid, input_ids, strict=True)]
        return self.reorder(answers)

    def answer(self, ids: list[int]) -> dict[str, Any]:
        with torch.no_grad():
            out = self.model(torch.tensor([ids]), output_hidden_states=True)
        states = torch.cat([out.hidden_states[layer + 1][0] for layer in self.layers], -1)
        logprobs = out.logits[0, -1].log_softmax(-1)
        best = int(logprobs.argmax())
        said = [(float(logprobs[best]) + self.bias, best, None)]
        return {"prompt_tokens": len(ids), "hidden_states": [states[self.keep].tolist()], "output_token_logprobs": said}

    def shutdown(self) -> None:
        self.is_down = True
