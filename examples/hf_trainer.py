"""Hugging Face's Trainer on the samples of a run.

    python hf_trainer.py FOLDER
    torchrun --nproc-per-node 2 hf_trainer.py FOLDER

Started again after any stop, it goes on from the newest checkpoint.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from eaglefeed import (
    DraftConfig,
    DraftModule,
    Eagle3Draft,
    EaglefeedTrainerMixin,
    EmbeddedServer,
    Ranks,
    RoundStream,
    RunAssets,
    connect,
    export_draft,
    load_run_assets,
    open_queue,
    open_store,
)
from eaglefeed.queue.base import LeaseQueue


class DraftTrainer(EaglefeedTrainerMixin, Trainer):
    """Your own subclass of Trainer works as well."""


def new_draft(assets: RunAssets) -> Eagle3Draft:
    """A draft that fits the run's target, with the target's embeddings and head to start from."""
    tensors = assets.tensors
    t2d = tensors.get("t2d", torch.ones(assets.contract.vocab_size, dtype=torch.bool))
    draft = Eagle3Draft(DraftConfig.from_target_config(assets.config, draft_vocab_size=int(t2d.sum())))
    draft.initialize_from_target(
        embed_tokens=tensors["embed_tokens.weight"],
        lm_head=tensors["lm_head.weight"],
        norm=tensors.get("norm.weight"),
        t2d=t2d,
    )
    return draft


@contextmanager
def samples_of(folder: Path, ranks: Ranks) -> Iterator[LeaseQueue | None]:
    """The run's samples; the first rank alone leases them."""
    if not ranks.is_first:
        yield None
        return
    with EmbeddedServer(folder / "queue") as server, closing(connect(server.url)) as client:
        yield open_queue(client, folder.name, "samples")


def main(folder: Path) -> None:
    """Train a draft to the end of the run's samples, and export it for servers."""
    args = TrainingArguments(
        output_dir=str(folder / "hf"),
        max_steps=100_000,  # more than will come: training ends with the samples
        lr_scheduler_type="constant",
        learning_rate=5e-4,
        per_device_train_batch_size=2,  # samples a forward, padded together
        gradient_accumulation_steps=1,
        save_steps=20,
        save_total_limit=2,  # shards go when the oldest checkpoint that is kept has learned them
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    store = open_store(str(folder / "shards"))
    assets = load_run_assets(store)  # the run's contract, and what trainers need of the target
    draft = new_draft(assets)
    with (
        Ranks.of_job(device=args.device) if args.world_size > 1 else Ranks.alone() as ranks,
        samples_of(folder, ranks) as samples,
        RoundStream(
            samples,
            store,
            ranks=ranks,
            samples_per_step=args.per_device_train_batch_size * args.gradient_accumulation_steps,
            contract=assets.contract,
            draft_vocab_size=draft.config.draft_vocab_size,
            consumer="hf-trainer",
            device=args.device,
            head=assets.head(draft.t2d, device=args.device),
        ) as stream,
    ):
        trainer = DraftTrainer(model=DraftModule(draft), args=args, stream=stream)
        trainer.train(resume_from_checkpoint=True)
        path = folder / "hf" / f"export-{trainer.state.global_step}"
        if ranks.is_first and not path.exists():
            export_draft(draft, path, target_config=assets.config, aux_layer_ids=assets.contract.aux_layer_ids)
            sys.stdout.write(f"{trainer.state.global_step} steps, the draft is in {path}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
