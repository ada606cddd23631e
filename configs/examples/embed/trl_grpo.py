"""TRL's GRPOTrainer with router replay: rows stay in the arena, TRL's batch has their handles, the loss their experts.

pip install trl; python configs/examples/embed/trl_grpo.py
"""

import tempfile

import torch
from datasets import Dataset
from engine import N, answer, branch, prompt
from model import tiny_model
from outcome import fingerprints, report
from trl import GRPOConfig, GRPOTrainer

from shmrl import Arena, Handle, assemble, encode, pack
from shmrl.inference.embedded.tiny import byte_tokenizer
from shmrl.trainer.replay import RouterReplay


class ReplayTrainer(GRPOTrainer):
    def __init__(self, *args, arena, **kwargs):
        super().__init__(*args, rollout_func=self.rollout, **kwargs)
        self.arena, self.replay, self.samples, self.seen = arena, RouterReplay(self.model), {}, []

    def rollout(self, prompts, trainer):
        kept = [encode(self.arena, branch(i), tag=f"embed/trl/{i // 4}/{i}") for i in range(len(prompts))]
        self.samples = {sample.handles[0]: sample for sample in kept}
        ids = [answer(i)["choices"][0]["token_ids"] for i in range(len(prompts))]
        return {"prompt_ids": [prompt(i) for i in range(N)], "completion_ids": ids, "logprobs": None}

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        handles = torch.tensor([[*handle] for handle in self.samples], dtype=torch.uint8)
        return output | {"handles": handles}  # 32 bytes per row, shuffled and split with the rest

    def _compute_loss(self, model, inputs):
        whole = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        routes = torch.full((*whole.shape, len(self.replay.layers), self.replay.top_k), -1)
        handles = [Handle(bytes(row.tolist())) for row in inputs["handles"]]
        for row, real, handle in zip(routes, whole.bool(), handles, strict=True):
            sample = self.samples.pop(handle)
            batch = assemble(self.arena, pack([sample], seq_len=sample.T, num_ranks=1)[0][0])
            self.seen += fingerprints(batch)
            row[real] = torch.from_numpy(batch.routing_signed("int64"))
        self.arena.free(handles)
        with self.replay.routes(routes.flatten(0, 1)):
            return super()._compute_loss(model, inputs)


if __name__ == "__main__":
    with Arena.create(capacity="64MiB") as arena, tempfile.TemporaryDirectory() as output:
        shape = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
        config = GRPOConfig(output, max_steps=1, use_cpu=True, report_to=[], gradient_checkpointing=False, **shape)
        data = Dataset.from_dict({"prompt": [bytes(prompt(0)).decode()] * N})
        given = {"arena": arena, "args": config, "train_dataset": data, "processing_class": byte_tokenizer()}
        trainer = ReplayTrainer(tiny_model(), lambda completions, **_: [len(text) for text in completions], **given)
        trainer.train()
        report("trl_grpo", trainer.seen, arena)
        arena.unlink()
