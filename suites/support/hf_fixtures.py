"""Makes baselines/hf: tiny models as transformers saves them, with the logits that transformers computes from them in float32.

    python suites/support/hf_fixtures.py make FOLDER        the fixtures
    python suites/support/hf_fixtures.py logits FOLDER ...  logits of models that are there, as JSON
    python suites/support/hf_fixtures.py save FROM TO BYTES ...  models that are there, as transformers saves them in files of so many bytes
    python suites/support/hf_fixtures.py round-trips FOLDER   models of hf_round_trips.py; folder -> what the model is, as JSON

    python suites/support/hf_fixtures.py hub FOLDER TEXT     a model as hubs have them, its tokenizer learnt of the file TEXT
    python suites/support/hf_fixtures.py greedy FOLDER PROMPT TOKENS   ids of PROMPT, and the text that most likely follows it, as JSON

The Python is one that has torch and transformers, and nothing of Alpha: no process of Alpha holds torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

TOKENS = [5, 0, 17, 3, 3, 18, 9, 12, 1, 16, 7, 2]
"""What the logits are of: every position of one sequence."""

GPT = {"vocab_size": 19, "n_positions": 12, "n_embd": 12, "n_head": 3, "n_layer": 2, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0}

MODELS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT, torch.float32, "1GB"),
    "gpt2-untied": (GPT2LMHeadModel, GPT2Config, {**GPT, "n_layer": 1, "tie_word_embeddings": False}, torch.float16, "1GB"),
    "llama": (LlamaForCausalLM, LlamaConfig, {**LLAMA, "rope_theta": 500000.0}, torch.bfloat16, "4KB"),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {**LLAMA, "num_key_value_heads": 4, "num_hidden_layers": 1, "tie_word_embeddings": True},
                   torch.float32, "1GB"),
    "gpt2-eps": (GPT2LMHeadModel, GPT2Config, {**GPT, "n_layer": 1, "layer_norm_epsilon": 0.03}, torch.float32, "1GB"),
    "llama-biased": (LlamaForCausalLM, LlamaConfig, {**LLAMA, "head_dim": 6, "attention_bias": True, "rms_norm_eps": 0.03}, torch.float32,
                     "1GB"),
    "llama-3.1": (LlamaForCausalLM, LlamaConfig, {**LLAMA, "head_dim": 8, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 20.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}}, torch.float32, "1GB"),
    "llama-linear": (LlamaForCausalLM, LlamaConfig, {**LLAMA, "num_hidden_layers": 1, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}}, torch.float32, "1GB"),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {**LLAMA, "rms_norm_eps": 1e-6}, torch.bfloat16, "1GB"),
}
"""Name -> (model, its configuration, sizes, type that it is saved in, largest file)."""

LARGER_GPT = {**GPT, "vocab_size": 320, "n_positions": 48, "n_embd": 48, "n_layer": 3}
LARGER_LLAMA = {**LLAMA, "vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "rope_theta": 500000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}

ROUND_TRIPS = {
    "gpt2": ("GPT-2, tied head", GPT2LMHeadModel, GPT2Config, LARGER_GPT, torch.float32, "1GB"),
    "gpt2-head": ("GPT-2, a head of its own", GPT2LMHeadModel, GPT2Config, {**LARGER_GPT, "tie_word_embeddings": False}, torch.float32,
                  "1GB"),
    "llama-tied": ("Llama, tied head", LlamaForCausalLM, LlamaConfig, {**LARGER_LLAMA, "tie_word_embeddings": True}, torch.float32, "1GB"),
    "llama": ("Llama, a head of its own", LlamaForCausalLM, LlamaConfig, LARGER_LLAMA, torch.float32, "1GB"),
    "llama3": ("Llama, frequencies scaled as Llama 3 does", LlamaForCausalLM, LlamaConfig, {**LARGER_LLAMA, "rope_parameters": LLAMA3},
               torch.float32, "1GB"),
    "linear": ("Llama, frequencies scaled linearly", LlamaForCausalLM, LlamaConfig, {**LARGER_LLAMA, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}}, torch.float32, "1GB"),
    "biases": ("Llama, biases in attention", LlamaForCausalLM, LlamaConfig, {**LARGER_LLAMA, "attention_bias": True}, torch.float32, "1GB"),
    "head-dim": ("Llama, `head_dim` apart from width / heads", LlamaForCausalLM, LlamaConfig, {**LARGER_LLAMA, "head_dim": 20},
                 torch.float32, "1GB"),
    "qwen2": ("Qwen2, biases of queries, keys, values", Qwen2ForCausalLM, Qwen2Config, {**LARGER_LLAMA, "rms_norm_eps": 1e-6},
              torch.float32, "1GB"),
    "files": ("Llama, in several files", LlamaForCausalLM, LlamaConfig, LARGER_LLAMA, torch.float32, "100KB"),
    "bf16": ("Llama, saved in BF16", LlamaForCausalLM, LlamaConfig, LARGER_LLAMA, torch.bfloat16, "1GB"),
    "f16": ("GPT-2, saved in F16", GPT2LMHeadModel, GPT2Config, LARGER_GPT, torch.float16, "1GB"),
}
"""Folder -> (what it is, model, its configuration, sizes, type that it is saved in, largest file)."""


def logits(folder: Path) -> list[list[float]]:
    """float32 [tokens, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].tolist()


def make(out: Path) -> None:
    """Every fixture, in folders of `out`."""
    for name, (model, config, sizes, dtype, largest) in MODELS.items():
        torch.manual_seed(len(name))
        made = model(config(**sizes))
        with torch.no_grad():
            for p in made.parameters():  # far from how training begins, so that a bias or a gain left out is seen
                p.copy_(p + 0.4 * torch.randn_like(p))
        made.to(dtype).save_pretrained(out / name, max_shard_size=largest)
        (out / name / "generation_config.json").unlink(missing_ok=True)
        found = {"torch": torch.__version__, "transformers": transformers.__version__, "tokens": TOKENS, "logits": logits(out / name)}
        (out / name / "logits.json").write_text(json.dumps(found) + "\n")


def round_trips(out: Path) -> dict[str, str]:
    """Every model of ROUND_TRIPS, in folders of `out`: folder -> what it is."""
    for number, (name, (_, model, config, sizes, dtype, largest)) in enumerate(ROUND_TRIPS.items()):
        torch.manual_seed(number)
        made = model(config(**sizes))
        with torch.no_grad():
            for p in made.parameters():  # a product as large as what goes in; biases and gains are seen
                p.copy_(torch.randn_like(p) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3))
        made.to(dtype).save_pretrained(out / name, max_shard_size=largest)
    return {name: of[0] for name, of in ROUND_TRIPS.items()}


def hub(out: str, text: str) -> None:
    """A Llama with groups of heads and scaled frequencies, in BF16 and several files, its vocabulary longer than its tokenizer's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    learnt = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train([text], learnt)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(out)
    torch.manual_seed(20)
    made = LlamaForCausalLM(LlamaConfig(**{**LARGER_LLAMA, "vocab_size": 416, "rope_parameters": LLAMA3}))
    made.to(torch.bfloat16).save_pretrained(out, max_shard_size="60KB")


def greedy(folder: str, prompt: str, tokens: int) -> dict[str, object]:
    """The prompt's ids, and the text of the `tokens` ids behind it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    return {"ids": ids[0].tolist(), "text": tokenizer.decode(found[0, ids.shape[1] :])}


def save(source: str, out: str, largest: str) -> None:
    """The model of one folder in another, in float32 and files of at most `largest` bytes."""
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).save_pretrained(out, max_shard_size=int(largest))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    elif sys.argv[1] == "round-trips":
        print(json.dumps(round_trips(Path(sys.argv[2]))))
    elif sys.argv[1] == "hub":
        hub(*sys.argv[2:])
    elif sys.argv[1] == "greedy":
        print(json.dumps(greedy(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    elif sys.argv[1] == "save":
        for wanted in zip(sys.argv[2::3], sys.argv[3::3], sys.argv[4::3]):
            save(*wanted)
    else:
        print(json.dumps([logits(Path(folder)) for folder in sys.argv[2:]]))
