"""Flags, models, rows and prompts, up to where training begins."""
import dataclasses
import importlib
import json
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import common
from helpers import random_model, save

cpu = torch.device("cpu")


# ------------------------------------------------------------------------------------------------------- flags

@pytest.mark.parametrize("script, name, value", [
    ("grpo", "save_every", 0), ("grpo", "eval_every", 0), ("grpo", "max_bad_steps", 0), ("grpo", "warmup_steps", -1),
    ("grpo", "kl_coef", -0.1), ("dpo", "label_smoothing", 0.6), ("grpo", "temperature", 0), ("dpo", "beta", 0),
    ("grpo", "seed", -1), ("grpo", "freeze_layers", 1.5), ("grpo", "max_grad_norm", 0), ("grpo", "eval_samples", 0),
    ("grpo", "updates_per_batch", 10 ** 7), ("reward_model", "pairs_per_step", 10 ** 7), ("ppo", "gamma", 1.1),
    ("dapo", "clip_high", 11), ("dapo", "overlong_buffer", -1), ("ppo", "missing_eos_score", -1e31)])
def test_a_flag_out_of_range(script, name, value):
    with pytest.raises(common.UserError, match=f"--{name} .*must be"):
        common.check_config(importlib.import_module(script).Config(**{name: value}))


def test_a_flag_of_ones_own_may_have_its_default():
    """Without an entry in LIMITS, an int would have to be at least 1."""
    @dataclasses.dataclass
    class Config(importlib.import_module("grpo").Config):
        replay: int = common.flag(0, "how many old rollouts to use again")
    common.check_config(Config())
    with pytest.raises(common.UserError, match="--replay -1: must be at least 0"):
        common.check_config(Config(replay=-1))


def test_a_flag_of_ones_own_may_be_a_list_or_none():
    @dataclasses.dataclass
    class Config(importlib.import_module("grpo").Config):
        stages: list[int] = dataclasses.field(default_factory=lambda: [2, 4])
        target: float | None = None
    assert common.parse_config(Config, []).stages == [2, 4]
    cfg = common.parse_config(Config, ["--stages", "1", "2", "3", "--target", "0.5"])
    assert (cfg.stages, cfg.target) == ([1, 2, 3], 0.5)


def test_a_wide_clip_is_allowed():
    common.check_config(importlib.import_module("dapo").Config(clip_high=5.0))


def test_a_system_column_is_the_prompts_system_message():
    """As in Orca's pairs, unless the prompt has one already."""
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    assert common.row_prompt({"system": "Be brief.", "question": "Hi"}) == [system, user]
    assert common.row_prompt({"system": "Be brief.", "prompt": [user]}) == [system, user]
    for prompt in ("<|im_start|>system\nBe brief.<|im_end|>", [{"role": "system", "content": "Sing."}, user]):
        assert common.row_prompt({"system": "Be brief.", "prompt": prompt}) == prompt
    for empty in ("", " ", None):
        assert common.row_prompt({"system": empty, "prompt": "Hi"}) == "Hi"
        assert common.row_prompt({"system": empty, "prompt": [user]}) == [user]  # or it would get no default one
    turns = [user, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"}]
    for prompt, before in (("Hi", [user]), ("Bye", turns), (None, turns)):
        answers = {name: [*before, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
        assert common.read_preference({"system": "Be brief.", "prompt": prompt, **answers}).prompt == [system, *before]


@pytest.mark.parametrize("flags", [{"clip_eps": -0.2}, {"temperature": 0.0}, {"lr_schedule": "Cosine"}, {"steps": 2.0},
                                   {"lr": "1e-4"}, {"data": Path("problems.jsonl")}, {"save_every": np.int64(5)},
                                   {"system_prompt": "caf\udce9"}])  # a byte that is not UTF-8, as sys.argv has it
def test_a_config_built_in_python_is_checked_too(flags, tmp_path):
    with pytest.raises(common.UserError, match=f"--{min(flags)} "):
        common.Run(importlib.import_module("grpo").Config(**flags, output_dir=str(tmp_path)))


def test_as_many_minibatches_as_completions():
    Config = importlib.import_module("grpo").Config
    common.check_config(Config(prompts_per_step=2, group_size=4, minibatches=8))
    with pytest.raises(common.UserError, match="more than"):
        common.check_config(Config(prompts_per_step=2, group_size=4, minibatches=9))


@pytest.mark.parametrize("script, flags, named", [
    ("ppo", {}, {"lr", "value_lr", "lam", "kl_coef", "max_new_tokens"}), ("grpo", {}, {"lr", "max_new_tokens"}),
    ("dapo", {"lr": 1e-6}, {"overlong_buffer", "max_new_tokens"}),
    ("reward_model", {}, {"lr"}), ("dpo", {"data": "pairs.jsonl"}, {"lr"}), ("dpo", {}, {"lr", "max_new_tokens"}),
    ("dpo", {"data": "pairs.jsonl", "on_policy": True}, {"lr", "max_new_tokens"}),
    ("dpo", {"data": "pairs.jsonl", "eval_problems": "problems.jsonl"}, {"lr", "max_new_tokens"}),
    ("ppo", {"lr": 1e-6, "value_lr": 1e-5, "lam": 1.0, "kl_coef": 0.05, "max_new_tokens": 500}, set()),
    ("ppo", {"model": "tiny"}, set())])
def test_defaults_that_suit_the_tiny_model_alone_are_named(script, flags, named, capsys):
    """dpo.py samples nothing where it only reads pairs, so then --max_new_tokens is none of them."""
    flags = {"model": "real", "eval_data": "more.jsonl", **flags}
    common.warn_of_flags(importlib.import_module(script).Config(**flags))
    assert set(re.findall(r"--(\w+)", capsys.readouterr().err)) == named


def test_flags_are_not_abbreviated():
    with pytest.raises(common.UserError, match="did you mean --steps"):
        common.parse_config(importlib.import_module("grpo").Config, ["--step", "3"])


def test_an_interruption_before_the_first_step(monkeypatch, capsys):  # capsys replaces stderr, which `launch` wraps
    def main(cfg):
        raise KeyboardInterrupt
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    with pytest.raises(SystemExit) as stopped:
        common.launch(main, common.RunConfig)
    assert stopped.value.code == 130


def test_an_error_is_one_line(monkeypatch, capsys):
    def main(cfg):
        raise common.UserError("first\n  second")
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    with pytest.raises(SystemExit):
        common.launch(main, common.RunConfig)
    assert capsys.readouterr().err.splitlines()[-1] == "grpo.py: error: first second"


def test_a_download_shows_its_progress(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    for hidden in (None, True):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", hidden)
        huggingface_hub.utils.enable_progress_bars() if not hidden else None
        with pytest.raises(SystemExit):
            common.launch(lambda cfg: None, common.RunConfig)
        assert huggingface_hub.utils.are_progress_bars_disabled() == bool(hidden)


def test_more_than_the_memory_of_the_machine_is_one_line_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    with pytest.raises(SystemExit) as stopped:
        common.launch(lambda cfg: torch.empty(2 ** 60), common.RunConfig)
    assert stopped.value.code == 1 and "grpo.py: error: out of memory " in capsys.readouterr().err


@pytest.mark.parametrize("function, advice", [
    ("load_model", "while loading the model"), ("optimizer_step", "in the optimizer step"),
    ("answer_logprobs", "lower --micro_batch_tokens")])
def test_the_phase_that_ran_out_of_memory(function, advice):
    scope = {}
    exec(f"def {function}(): raise MemoryError", scope)
    try:
        scope[function]()
    except MemoryError as error:
        assert advice in common.memory_advice(error)


def test_an_error_of_rank_0_reaches_all(monkeypatch):
    """Otherwise the others would wait for rank 0 forever."""
    told = []
    monkeypatch.setattr(common, "from_main_rank", lambda value: told.append(value) or value)
    def full():
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError):
        common.on_main_rank(full)
    assert len(told) == 1 and told[0].errno == 28


def test_ranks_wait_for_hours(monkeypatch):
    """One may sample for long, or rank 0 download a model: for longer than the defaults, 10 and 30 minutes."""
    given = {}
    monkeypatch.setattr(common, "os", SimpleNamespace(environ={"RANK": "0"}))  # as torchrun sets it
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **settings: given.update(settings))
    common.setup_device()
    assert given["timeout"].total_seconds() >= 2 * 3600


def test_only_the_first_process_says_something(monkeypatch, capsys):
    for rank in (1, 0):
        monkeypatch.setattr(common, "rank", lambda: rank)
        common.say(f"from {rank}")
    assert capsys.readouterr().err == "from 0\n"


def test_ranks_leave_together(monkeypatch):
    """Under torchrun every rank waits for the others, and then exits with the code of the signal."""
    left = []
    monkeypatch.setattr(common, "world_size", lambda: 2)
    monkeypatch.setattr(common.dist, "barrier", lambda: left.append("waited"))
    monkeypatch.setattr(common.os, "_exit", left.append)
    for name in ("stdout", "stderr"):  # os._exit would lose what they hold
        monkeypatch.setattr(getattr(sys, name), "flush", lambda name=name: left.append(name))
    with pytest.raises(SystemExit):
        common.leave(143)
    assert left == ["waited", "stdout", "stderr", 143]


# ------------------------------------------------------------------------------------------------------ models

def save_random(path, architecture="Qwen2", resize=None, **changes):
    model, tokenizer = random_model(architecture, **changes)
    if resize:
        model.resize_token_embeddings(resize)
    save(path, model, tokenizer)
    return model, tokenizer


def policy_config(path, **more):
    return SimpleNamespace(model=str(path), data="arithmetic", trust_remote_code=False, **more)


def test_the_reference_is_frozen_and_a_loaded_model_trains(tmp_path):
    random_model("Qwen2")[0].save_pretrained(tmp_path)
    reference = common.load_reference(SimpleNamespace(model=str(tmp_path), trust_remote_code=False), cpu)
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in common.load_model(str(tmp_path), cpu).parameters())


def test_dropout_is_off_in_the_text_part(tmp_path):
    text = dict(vocab_size=26, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, attention_dropout=0.5)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8,
                  patch_size=4)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    policy = common.load_model(str(tmp_path), cpu)
    assert policy.config.get_text_config().attention_dropout == 0
    # and what reads no text does not train: no gradient would reach it
    trained = {name.split(".")[1]: parameter.requires_grad for name, parameter in policy.named_parameters()}
    assert trained == {"language_model": True, "vision_tower": False, "multi_modal_projector": False}


def test_gemma_2_attends_with_its_soft_cap(tmp_path):
    """Eager attention has it. With transformers 5.17, sdpa would be the default and silently go without."""
    model, _ = random_model("Gemma2", attn_logit_softcapping=0.5)
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    ids = torch.arange(3, 9)[None]
    policy = common.load_model(str(tmp_path), cpu)
    assert torch.allclose(policy(ids).logits, model(ids).logits, atol=1e-5)


def test_weights_that_the_config_has_no_place_for_are_named(tmp_path, capsys):
    """A layer fewer in config.json than in the file would train a model cut short."""
    random_model("Qwen2")[0].save_pretrained(tmp_path)
    common.load_model(str(tmp_path), cpu)
    assert "no place for" not in capsys.readouterr().err
    random_model("Qwen2", num_hidden_layers=1)[0].config.save_pretrained(tmp_path)
    common.load_model(str(tmp_path), cpu)
    assert "has no place for, such as model.layers.1." in capsys.readouterr().err


def test_a_model_is_in_evaluation_mode_on_every_rank(tmp_path, monkeypatch):
    """All but rank 0 build theirs from the config, without from_pretrained, which calls `eval`."""
    random_model("Qwen2")[0].save_pretrained(tmp_path)
    monkeypatch.setattr(common, "rank", lambda: 1)
    monkeypatch.setattr(common, "on_main_rank", lambda work: None)
    monkeypatch.setattr(common, "shard", lambda model, device: model)
    assert not common.load_model(str(tmp_path), cpu).training


def test_a_frozen_reward_model_needs_its_head(tmp_path):
    """transformers would initialize a missing head at random."""
    random_model("Qwen2")[0].save_pretrained(tmp_path)
    with pytest.raises(common.UserError, match=r"no weights for score.weight .is it a reward"):
        common.load_model(str(tmp_path), cpu, trainable=False, cls=common.AutoModelForSequenceClassification,
                          num_labels=1)


def test_a_reward_model_is_no_policy(tmp_path):
    """With tied embeddings it has all weights of a language model, so no missing weight tells the two apart."""
    config = random_model("Qwen2", tie_word_embeddings=True)[0].config
    config.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(common.UserError, match="ForSequenceClassification is a classifier"):
        common.load_model(str(tmp_path), cpu)
    assert common.load_model(str(tmp_path), cpu, trainable=False, cls=common.AutoModelForSequenceClassification)


def test_an_encoder_is_no_policy(tmp_path):
    """transformers loads BERT as a causal model, but its tokens see those that follow."""
    config = random_model("Bert")[0].config
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(common.UserError, match="BertForMaskedLM is .* no causal language model"):
        common.load_model(str(tmp_path), cpu)


def test_quantized_weights_do_not_train(tmp_path):
    save_random(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(common.UserError, match="its weights are quantized"):
        common.load_model(str(tmp_path), cpu)


def test_a_classifier_without_a_scalar_head(tmp_path):
    config = random_model("Bert")[0].config
    config.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(common.UserError, match="one label, whose head is a layer named score"):
        common.load_model(str(tmp_path), cpu, cls=common.AutoModelForSequenceClassification)


def test_a_frozen_model_is_held_in_the_dtype_it_computes_in(tmp_path, monkeypatch):
    random_model("Qwen2")[0].save_pretrained(tmp_path)
    monkeypatch.setattr(common, "compute_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(common, "shard", lambda model, device: model)
    for trainable, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        assert common.load_model(str(tmp_path), torch.device("cpu"), trainable).dtype == dtype


def test_the_layers_of_a_model_that_also_sees():
    model, _ = random_model("Qwen2")
    vision = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(5))
    assert common.decoder_layers(torch.nn.ModuleDict({"vision": vision, "text": model})) is model.model.layers


def test_a_runs_directory_is_no_model(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(common.UserError, match="run: is the output of a run; its model is .*run/model"):
        common.load_tokenizer(str(tmp_path / "run"))
    common.tiny_tokenizer().save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model").mkdir()
    assert common.load_tokenizer(str(tmp_path / "other")).eos_token == "<eos>"  # a checkpoint may have such a folder


def test_a_tokenizer_without_an_end(tmp_path):
    tokenizer = common.tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(common.UserError, match="no end-of-sequence token"):
        common.load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("architecture, kind", [("Qwen2", "Qwen2Tokenizer"), ("Qwen2", "GPT2Tokenizer"),
                                                ("Llama", "LlamaTokenizer"), ("Qwen3", "LlamaTokenizerFast")])
def test_the_tokenizer_is_that_of_the_file(architecture, kind, tmp_path):
    """For some architectures transformers takes only the vocabulary of tokenizer.json, and splits text its own way.
    (DeepSeek's models of Llama's shape are byte-level, under another tokenizer's name: 5.17 loses their spaces.)"""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own.train_from_iterator(["2023 is a year"] * 9, trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False))
    getattr(transformers, f"{architecture}Config")(vocab_size=300).save_pretrained(tmp_path)
    own.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "The year</s>\n 2023"
    ids = common.load_tokenizer(str(tmp_path))(text, add_special_tokens=False)["input_ids"]
    assert ids == own.encode(text).ids and own.decode(ids, skip_special_tokens=False) == text
    # A class that came with the model may encode as it likes.
    settings["auto_map"] = {"AutoTokenizer": [None, "own_tokenizer.Own"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "Own"}))
    (tmp_path / "own_tokenizer.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n"
        "    def encode(self, text, **more): return [7]\n")
    assert common.load_tokenizer(str(tmp_path), trust_remote_code=True).encode(text) == [7]


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_a_tokenizer_that_says_it_is_only_a_file_is_read_from_it(kind, tmp_path):
    """Bytes without merges look the same however they are split, so that only the name tells."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    vocabulary = ["<s>", "</s>", *pre_tokenizers.ByteLevel.alphabet()]
    own = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own.save(str(tmp_path / "tokenizer.json"))
    transformers.Qwen2Config().save_pretrained(tmp_path)
    settings = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert type(common.load_tokenizer(str(tmp_path))) is transformers.PreTrainedTokenizerFast


def test_a_mistral_tokenizer_is_read_from_its_file_where_mistral_common_is_installed(tmp_path, monkeypatch):
    """vLLM brings mistral-common. transformers would then take its tokenizer, which has no template and no file."""
    from transformers.integrations.mistral import tokenizer as mistral
    from transformers.models.auto import tokenization_auto as auto
    common.tiny_tokenizer().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tekken.json").write_text("{}")
    transformers.MistralConfig().save_pretrained(tmp_path)
    monkeypatch.setitem(auto.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")  # as if it were installed
    monkeypatch.setattr(mistral, "resolve_mistral_format", lambda *args, **kwargs: pytest.fail("was asked for"))
    assert common.load_tokenizer(str(tmp_path)).encode("1+1=?") == common.tiny_tokenizer().encode("1+1=?")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_space_goes_in_front_of_what_follows_a_special_token_if_the_file_has_it_so(tmp_path, legacy):
    """As Llama 2 and TinyLlama read their own templates; transformers' class leaves it out."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab[]"]
    own = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], unk_token="<unk>", fuse_unk=True,
                               byte_fallback=True))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.add_special_tokens([AddedToken(token, normalized=False) for token in vocabulary[:3]])
    own.save(str(tmp_path / "tokenizer.json"))
    transformers.LlamaConfig(vocab_size=len(vocabulary)).save_pretrained(tmp_path)
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "legacy": legacy}  # it knows the end's name
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = common.load_tokenizer(str(tmp_path))
    assert tokenizer.eos_token == "</s>"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
    common.save_model(model, tokenizer, tmp_path / "model")
    for read in (tokenizer, common.load_tokenizer(str(tmp_path / "model")),
                 transformers.AutoTokenizer.from_pretrained(tmp_path / "model")):
        for text, tokens in (("<s>[a] b</s>", "<s> ▁ [ a ] ▁ b </s>"), (" b</s> b", "▁ ▁ b </s> ▁ ▁ b")):
            ids = read(text, add_special_tokens=False)["input_ids"]
            assert [vocabulary[i] for i in ids] == tokens.split()


def test_a_tokenizer_may_have_the_image_token_of_its_larger_siblings(tmp_path):
    """Gemma 3 1B has it, one id beyond its embedding."""
    model, tokenizer = random_model("Gemma3Text")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    save(tmp_path, model, tokenizer)
    assert common.load_policy(policy_config(tmp_path), cpu)[1].convert_tokens_to_ids("<image_soft_token>") == 26


def test_a_pad_token_beyond_the_embedding_is_replaced(tmp_path):
    """As copies of Llama 2 have it. No other special token may be there that a template writes, and no plain one."""
    model, tokenizer = random_model("Llama")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    save(tmp_path, model, tokenizer)
    policy, tokenizer = common.load_policy(policy_config(tmp_path), cpu)
    assert tokenizer.pad_token == tokenizer.eos_token
    common.sample(policy, tokenizer, ["1+1=?", "12+34=?"], 1, 2)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(common.UserError, match="its tokenizer has ids up to 27, its embedding only 26 rows"):
        common.load_policy(policy_config(tmp_path), cpu)


def test_an_embedding_may_be_padded(tmp_path):
    save_random(tmp_path, resize=64)
    assert common.load_policy(policy_config(tmp_path), cpu)[0].config.vocab_size == 64


def test_the_end_needs_a_row_in_the_embedding(tmp_path):
    """Otherwise no completion could end. The chat template need not write it."""
    model, tokenizer = random_model("Qwen2")
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    save(tmp_path, model, tokenizer)
    with pytest.raises(common.UserError, match="its tokenizer has ids up to 26, its embedding only 26 rows"):
        common.load_policy(policy_config(tmp_path), cpu)


def test_completions_must_leave_room_for_a_prompt(tmp_path):
    save_random(tmp_path)
    with pytest.raises(common.UserError, match="the context of .* is 256 tokens"):
        common.load_policy(policy_config(tmp_path, max_new_tokens=256), cpu)
    assert common.load_policy(policy_config(tmp_path, max_new_tokens=255), cpu)[1].model_max_length == 256


def test_the_models_context_counts_and_not_the_tokenizers_limit(tmp_path):
    _, tokenizer = random_model("Qwen2")
    save_random(tmp_path)
    tokenizer.model_max_length = 100
    tokenizer.save_pretrained(tmp_path)
    assert common.load_policy(policy_config(tmp_path, max_new_tokens=200), cpu)[1].model_max_length == 256


def test_mamba_has_no_limit(tmp_path):
    save_random(tmp_path, "Mamba")
    assert common.load_policy(policy_config(tmp_path, max_new_tokens=5000), cpu)[1].model_max_length > 1e6


def test_a_tied_weight_is_saved_once(tmp_path):
    model, tokenizer = random_model("Qwen2", tie_word_embeddings=True)
    # `save_model` casts to the checkpoint's bfloat16, after which the tied weights no longer share memory.
    model.bfloat16().save_pretrained(tmp_path / "base")
    policy = common.load_model(str(tmp_path / "base"), cpu)
    common.save_model(policy, tokenizer, tmp_path / "saved")
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert weights.keys() == dict(policy.named_parameters()).keys() and "lm_head.weight" not in weights
    assert common.load_tokenizer(str(tmp_path / "saved")).encode("<think>1") == tokenizer.encode("<think>1")
    assert torch.equal(common.load_model(str(tmp_path / "saved"), cpu).lm_head.weight, policy.lm_head.weight)


def test_a_head_with_weights_of_its_own_is_saved_as_one(tmp_path):
    """Although its config.json ties it to the embedding, as vLLM then would."""
    model, tokenizer = random_model("Qwen2", tie_word_embeddings=False)
    save(tmp_path / "base", model, tokenizer)
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    policy = common.load_model(str(tmp_path / "base"), cpu)
    common.save_model(policy, tokenizer, tmp_path / "saved")
    assert torch.equal(policy.lm_head.weight, model.lm_head.weight)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_model_that_load_model_has_not_loaded_is_saved_as_it_is(tmp_path):
    model, tokenizer = random_model("Qwen2")
    common.save_model(model.bfloat16(), tokenizer, tmp_path)
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert transformers.AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_the_rotary_base_also_stands_where_transformers_4_reads_it(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0}
    model, tokenizer = random_model("Qwen2", rope_parameters={**rope, "rope_theta": 1e6})
    common.save_model(model, tokenizer, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (saved["rope_theta"], saved["rope_scaling"]) == (1e6, rope)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "saved").rope_parameters == model.config.rope_parameters


@pytest.mark.parametrize("architecture, rope, settings", [
    ("Phi", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
     {"rope_theta": 1e4, "partial_rotary_factor": 0.4}),
    ("Phi3", {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0], "short_factor": [1.0],
              "original_max_position_embeddings": 128},
     {"rope_theta": 1e4, "rope_scaling": {"type": "longrope", "long_factor": [2.0], "short_factor": [1.0]}}),
    ("Gemma3Text", {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
     {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("GPT2", None, {})])
def test_rotary_settings_as_transformers_4_has_them(architecture, rope, settings):
    config = getattr(transformers, f"{architecture}Config")()
    config.rope_parameters = rope
    assert common.rotary_settings_4(config) == settings


def test_the_tokenizers_settings_stand_where_transformers_4_reads_them(tmp_path):
    """As for Qwen2.5, which has more special tokens, and Llama 3, whose tokenizer has no class of its own."""
    model, tokenizer = random_model("Llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    common.save_model(model, tokenizer, tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in saved
    assert saved["additional_special_tokens"] == ["<|im_end|>"]
    loaded = common.load_tokenizer(str(tmp_path))
    assert type(loaded) is type(tokenizer) and loaded.all_special_tokens == tokenizer.all_special_tokens


def test_files_that_transformers_5_leaves_out_are_kept(tmp_path):
    """llama.cpp's converter reads tokenizer.model, and beside it the added tokens and whether there is a BOS."""
    model, tokenizer = random_model("Llama")
    save(tmp_path / "0", model, tokenizer)
    for name in common.UNSAVED_FILES:
        (tmp_path / "0" / name).write_bytes(name.encode())
    for i in range(2):  # again from what was saved
        tokenizer = common.load_tokenizer(str(tmp_path / str(i)))
        common.save_model(model, tokenizer, tmp_path / str(i + 1))
    for name in common.UNSAVED_FILES:
        assert (tmp_path / "2" / name).read_bytes() == name.encode()
    saved = json.loads((tmp_path / "2" / "tokenizer_config.json").read_text())
    assert saved["add_bos_token"] is False
    assert saved["added_tokens_decoder"]["4"] == {"content": "</think>", "single_word": False, "lstrip": False,
                                                  "rstrip": False, "normalized": False, "special": False}
    loaded = common.load_tokenizer(str(tmp_path / "2"))
    assert loaded.encode("1<think>2</think>") == common.tiny_tokenizer().encode("1<think>2</think>")


def test_a_saved_model_names_no_code_that_does_not_lie_beside_it(tmp_path):
    """Phi-3's config.json does, though transformers has the architecture."""
    model, tokenizer = random_model("Qwen2", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    common.save_model(model, tokenizer, tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)


def test_what_a_model_keeps_in_float32_is_saved_in_float32(tmp_path):
    """The biases of DeepSeek-V3's expert router, for example: rounded, they would choose other experts."""
    model, tokenizer = random_model("Qwen2")
    model.bfloat16().save_pretrained(tmp_path / "base")
    policy = common.load_model(str(tmp_path / "base"), cpu)
    policy._keep_in_fp32_modules_strict = {"layernorm"}
    common.save_model(policy, tokenizer, tmp_path / "saved")
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(weight.dtype == (torch.float32 if "layernorm" in name else torch.bfloat16)
               for name, weight in weights.items())


def test_what_a_killed_process_left_is_removed(tmp_path):
    for left in ((".a.tmp", ".a.old"), (".a.tmp", ".a.old", "a")):  # at last it was about to remove the old one
        for name in left:
            (tmp_path / name / "x").mkdir(parents=True, exist_ok=True)
        common.write_directory(tmp_path / "a", lambda folder: (folder / "file").write_text("1"))
        assert [path.name for path in tmp_path.rglob("*")] == ["a", "file"]


def test_what_a_process_killed_while_it_replaced_a_directory_left_is_kept_until_the_next_one_is_complete(tmp_path):
    """It had moved the old directory aside. The next write fails on a full disk."""
    common.write_directory(tmp_path / ".a.old", lambda folder: (folder / "file").write_text("1"))

    def broken(folder):
        raise OSError(28, "No space left on device")
    with pytest.raises(common.TrainingFailed, match="No space left"):
        common.write_directory(tmp_path / "a", broken)
    assert [path.name for path in tmp_path.iterdir()] == [".a.old"] and (tmp_path / ".a.old" / "file").exists()


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    (tmp_path / ".a.tmp-99999").mkdir()
    common.write_directory(tmp_path / "a", lambda folder: (folder / "file").write_text("1"), replace=False)
    assert (tmp_path / ".a.tmp-99999").exists()


def test_a_directory_is_replaced_without_a_trace(tmp_path):
    for text in ("1", "2"):
        common.write_directory(tmp_path / "a", lambda folder: (folder / "file").write_text(text))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_directory_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """Else a machine that loses power could leave a whole model/ with empty files."""
    events, rename = [], os.rename
    monkeypatch.setattr(os, "fsync", lambda file: events.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    monkeypatch.setattr(os, "rename", lambda *paths: events.append("rename") or rename(*paths))

    def fill(folder):
        (folder / "part").mkdir()
        (folder / "part" / "file").write_text("1")
    common.write_directory(tmp_path / "a", fill)
    assert events == ["file", "rename"]


def test_a_failed_write_is_an_error(tmp_path):
    def broken(folder):
        raise OSError(28, "No space left on device")
    with pytest.raises(common.TrainingFailed, match="No space left"):
        common.write_directory(tmp_path / "a", broken, replace=False)


# -------------------------------------------------------------------------------------------------------- rows

def rows(tmp_path, *content):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(tmp_path / "rows.jsonl")


def test_a_file_of_any_name_holds_json_lines(tmp_path):
    path = tmp_path / "problems.txt"
    path.write_text('{"prompt": "p", "answer": "1"}\n')
    assert [problem.prompt for problem in common.read_problems(str(path))] == ["p"]


def test_the_split_of_a_hub_dataset(monkeypatch):
    asked = []
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(
        load_dataset=lambda name, config, split: (
            asked.append((name, config, split)) or [{"prompt": "p", "answer": "1"}])))
    for data in ("some/set", "some/set:main", "some/set:main:validation"):
        for split in ("train", "eval"):
            common.read_rows(data, split)
    assert asked == [("some/set", None, "train"), ("some/set", None, "test"), ("some/set", "main", "train"),
                     ("some/set", "main", "test"), *[("some/set", "main", "validation")] * 2]
    common.read_rows("some/set::train[:90%]", "train")
    assert asked[-1] == ("some/set", "", "train[:90%]")
    assert common.read_rows("some/set", "train")[0][1] == "some/set row 1"  # its place, for error messages


def test_a_hub_dataset_without_rows(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *args, **split: []))
    with pytest.raises(common.UserError, match="some/set: no rows"):
        common.read_rows("some/set", "train")


@pytest.mark.parametrize("answer, gold", [
    (0.1 + 0.2, "0.3"), (2.0, "2"), (0.0625, "0.0625"), (1e22, "1e+22"), (7, "7")])
def test_a_number_as_an_answer(answer, gold, tmp_path):
    """How binary fractions round is no part of it."""
    problem, = common.read_problems(rows(tmp_path, {"question": "q", "answer": answer}))
    assert problem.answer == gold


def test_the_first_of_several_fields_counts(tmp_path):
    problem, = common.read_problems(rows(tmp_path, {
        "prompt": "p", "question": "q", "answer": "5", "solution": "2+3, that is 5 of them",
        "reward_model": {"ground_truth": "6"}}))
    assert (problem.prompt, problem.answer) == ("p", "5")
    problem, = common.read_problems(rows(tmp_path, {
        "question": "q", "answer": "Two and three make five.", "reference_answer": "5"}))  # as MegaScience has them
    assert problem.answer == "5"
    problem, = common.read_problems(rows(tmp_path, {"question": "q", "final_answer": ["6"], "answer": 5}))
    assert problem.answer == "5"
    for name in ("final_answer", "expected_answer"):
        problem, = common.read_problems(rows(tmp_path, {"question": "q", name: "7", "solution": "8"}))
        assert problem.answer == "7"


def test_ppo_learns_from_the_prompts_of_preferences(tmp_path):
    """The row that a reward gets, and from which `retokenize` takes the prompt, has the prompt as well."""
    turns = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))]
    chosen, rejected = ([*turns, {"role": "assistant", "content": text}] for text in "ab")
    dialogue = "\n\nHuman: hi\n\nAssistant:"
    problems = common.read_problems(rows(
        tmp_path, {"chosen": chosen, "rejected": rejected}, {"prompt": "1", "chosen": chosen, "rejected": rejected},
        {"chosen": dialogue + " hello", "rejected": dialogue + " go away"},
        {"responses": [dialogue + " hello", dialogue + " go away"]},
        {"prompt": "p", "chosen": "a", "rejected": "a"}), need_answer=False)
    assert [problem.prompt for problem in problems] == [turns, turns, dialogue, dialogue, "p"]
    assert all(common.row_prompt(problem.row) == problem.prompt and problem.answer is None for problem in problems)


@pytest.mark.parametrize("read, row, message", [
    (common.read_problems, {"input": "1+1=?", "output": "2"}, "want a prompt .* it has .'input', 'output'.$"),
    (common.read_problems, {"prompt": "1+1=?", "output": "2"}, "no answer .* it has .'prompt', 'output'.$"),
    (common.read_preferences, {"prompt": "1", "responses": [[], []]}, "want chosen and rejected"),
    (common.read_problems, {"prompt": [{"from": "human"}]}, r"want a prompt .*; not \[{'from': 'human'}\]$"),
    (common.read_preferences, {"chosen": 5, "rejected": "b"}, r"want chosen and rejected.*; not \[5, 'b'\]$"),
    (common.read_preferences, {"prompt": "1", "good": "2"}, "want chosen and rejected.* it has .'prompt', 'good'.$"),
    (common.read_preferences, {"text": "1", "chosen": "2", "rejected": "3"}, "no prompt.* it has .'text', 'chosen'")])
def test_a_row_that_is_refused_is_shown_with_the_columns_that_it_has(read, row, message, tmp_path):
    with pytest.raises(common.UserError, match="line 1: " + message):
        read(rows(tmp_path, row))


def test_a_pipe_is_read_like_a_file(tmp_path):
    """As a shell's <(head -100 train.jsonl) is one."""
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_text, args=['{"prompt": "1+1=?", "answer": "2"}\n']).start()
    assert [problem.answer for problem in common.read_problems(str(tmp_path / "pipe"))] == ["2"]


@pytest.mark.parametrize("row", [
    {"chosen": "x"}, {"reward_model": "x"}, {"system": 5}, {"system": "1+\n"}, {"final_answer": True}])
def test_a_column_that_is_no_use_is_ignored(row, tmp_path):
    """Half a preference; a name, and not verl's verdict; no text; a system message that the prompt repeats."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=?", "answer": "2", **row}))
    [problem] = common.read_problems(str(path))
    assert (problem.prompt, problem.answer) == ("1+1=?", "2")


def test_messages_have_a_role_and_a_text():
    assert common.is_prompt([{"role": "user", "content": "1"}])
    for broken in ({"role": "user", "content": None}, {"role": None, "content": "1"}, {"content": "1"}, "1"):
        assert not common.is_prompt([broken])


def test_only_the_verifier_needs_answers(tmp_path):
    path = rows(tmp_path, {"prompt": "p"})
    cfg = SimpleNamespace(data=path, eval_data="", reward="reward.py:f")
    problems, held_out = common.read_train_and_eval(cfg)
    assert problems[0].answer is None and held_out == []
    cfg.reward = "verifier"
    with pytest.raises(common.UserError, match="no answer"):
        common.read_train_and_eval(cfg)


def test_a_text_is_no_answer_for_the_verifier(tmp_path, capsys):
    """NuminaMath has "proof" as the answer of every proof: the policy would learn to write that."""
    path = rows(tmp_path, {"prompt": "p", "answer": "proof"}, {"prompt": "q", "answer": "2"},
                {"prompt": "r", "solution": "First, " + "we add. " * 99 + "So it is 2k."})
    assert [problem.prompt for problem in common.read_problems(path)] == ["q"]
    assert "left out 2 of 3 rows whose answer is a proof, or longer than 400" in capsys.readouterr().err
    assert len(common.read_problems(path, need_answer=False)) == 3


def test_held_out_rows_are_never_those_of_training(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "answer": "1"}\n')
    cfg = SimpleNamespace(data=str(path), eval_data="", reward="verifier")
    assert common.read_train_and_eval(cfg)[1] == []
    cfg.data = "arithmetic:1"
    train, held_out = common.read_train_and_eval(cfg)
    assert held_out and not {p.prompt for p in train} & {p.prompt for p in held_out}


def test_each_seed_has_its_own_orders():
    one, two = (common.Shuffled(list(range(50)), seed) for seed in (1, 2))
    first_of_two = two.next(50)
    assert one.next(50) != first_of_two != one.next(50)  # seed 1's second pass is not seed 2's first either


def test_the_first_items_are_the_next_ones():
    data = common.Shuffled(list(range(50)), 0)
    assert data.first(7) == data.next(7) and sorted(data.first(99)) == data.items


@pytest.mark.parametrize("change", [
    {"prompt_ids": [2]}, {"answer_ids": [[3], [5]]}, {"scores": [3.0, 1.0]}, {"margin": 1.0}])
def test_the_checksum_covers_what_training_reads(change):
    """So that --resume refuses data whose prompts and answers are the same but whose scores or margins are not."""
    row = common.Preference("1", [1], ["3", "4"], [[3], [4]], [2.0, 1.0])
    same, other = (common.Shuffled([dataclasses.replace(row, **changes)], 0).checksum for changes in ({}, change))
    assert common.Shuffled([row], 1).checksum == same != other
    changed = dataclasses.replace(row, **change)
    assert len({common.Shuffled(rows, 0).checksum for rows in ([row, changed], [changed, row], [row, row], [])}) == 4


# ----------------------------------------------------------------------------------------------------- prompts

def encode_config(**more):
    defaults = dict(model="tiny", system_prompt="none", thinking="auto", max_prompt_tokens=99, max_completion_tokens=99)
    return SimpleNamespace(**{**defaults, **more})


def test_prompts_without_a_template():
    tokenizer = common.tiny_tokenizer()
    assert common.render_prompt("1+1=?", tokenizer, "2") == ("2\n\n1+1=?", False)
    assert common.render_prompt("1+1=?", tokenizer, "") == ("1+1=?", False)
    messages = [{"role": "user", "content": "1"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "3"}]
    rendered = "User: 1\n\nAssistant: 2\n\nUser: 3\n\nAssistant:"
    assert common.render_prompt(messages, tokenizer, "none") == (rendered, False)


def test_a_template_opens_the_answer():
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{{ m['content'] }}{% endfor %}"
                               "{% if add_generation_prompt %}={% endif %}")
    assert common.render_prompt("1", tokenizer, "none") == ("1=", True)


def test_a_template_writes_the_same_date_every_day():
    """Or a run of Llama 3.2 could not be resumed the next day: its prompts would be others."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = ("  {% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}\n|"
                               "{{ strftime_now('%B %d, %Y') }}|{{ strftime_now('%Y-%m-%d') }}|"
                               "{{ messages[0].content }}")
    assert common.render_prompt("1", tokenizer, "none") == ("26 Jul 2024|July 26, 2024|2024-07-26|1", True)


@pytest.mark.parametrize("name", ["open_thinking", "enable_thinking", "thinking"])  # MiniMind's; Qwen3's; DeepSeek's
def test_a_template_that_can_leave_thinking_open_does_so_for_problems(name):
    """Unasked, this template closes <think> at once. Answers in preference data have no such part. It is the default
    system prompt that asks for thoughts: with another one, PPO's prompts are those of its reward model."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{{ m['content'] }}{% endfor %}"
                               "<think>{% if not " + name + " %}</think>{% endif %}")
    assert common.render_prompt("1", tokenizer, "")[0].endswith("1<think>")
    assert common.render_prompt("1", tokenizer, "", default="")[0].endswith("1<think></think>")
    for default in (common.SYSTEM_PROMPT, ""):
        assert common.render_prompt("1", tokenizer, "2", default) == ("21<think></think>", True)
    for thinking, end in (("on", "1<think>"), ("off", "1<think></think>")):  # --thinking, whatever the system prompt
        problems = [common.Problem("1", [], "2", {}) for _ in range(3)]
        for problem, system_prompt in zip(problems, ("", "2", "none")):
            common.encode_prompts([problem], tokenizer, encode_config(system_prompt=system_prompt, thinking=thinking,
                                                                      model="other", max_prompt_tokens=999), "--data")
            assert problem.rendered[0].endswith(end) and problem.opening == end[1:] * (thinking == "on")
        preference = common.Preference("1", [], ["2", "3"], [], [1.0, 0.0])  # with or without a thought, as answers are
        common.encode_preferences([preference], tokenizer, encode_config(thinking=thinking, model="other"), "--data")
        assert preference.rendered[0] == "1"
    no_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer.chat_template = no_system + tokenizer.chat_template
    assert common.render_prompt("1", tokenizer, "") == (common.SYSTEM_PROMPT + "\n\n1<think>", True)


def test_a_reward_models_template_is_not_asked_to_think():
    """It was not in preference data. This one (MiniMind's) then has an empty thought, also in front of an answer."""
    tokenizer = chat_tokenizer("")
    tokenizer.chat_template = ("{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }}{% endfor %}"
                               "<think>{% if not open_thinking %}</think>{% endif %}"
                               "{% if not add_generation_prompt %}{{ messages[-1]['content'] }}<turn>{% endif %}")
    rollout = common.Rollout(None, None, torch.ones(1, 1), ["2"], torch.tensor([True]))
    for opening, answer in (("", "<think></think>2<turn>"), ("<think>", "<think>\n2<turn>")):
        problem = common.Problem("1", [], None, {"prompt": "1"}, opening=opening)
        text = tokenizer.decode(common.retokenize([problem], rollout, tokenizer, "").input_ids[0])
        assert text == tokenizer.decode(tokenizer(f"{common.SYSTEM_PROMPT}1{answer}")["input_ids"])


def test_a_template_without_a_system_role():
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}"
                               "{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
                               "{{ m['content'] }},{% endfor %}")
    messages = [{"role": "user", "content": "1"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "3"}]
    assert common.render_prompt(messages, tokenizer, "0") == ("0\n\n1,2,3,", True)


def test_a_template_that_leaves_out_a_message():
    """A system prompt then goes into the first message. Any other role is a mistake in the data."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}"
                               "{{ m['content'] }},{% endif %}{% endfor %}")
    assert common.render_prompt("1", tokenizer, "0") == ("0\n\n1,", True)
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | tojson")  # still there
    assert common.render_prompt("one\ntwo", tokenizer, "none") == ('"one\\ntwo",', True)
    with pytest.raises(common.UserError, match="leaves out the message of role human"):
        common.render_prompt([{"role": "human", "content": "1"}], tokenizer, "none")
    tokenizer.chat_template = tokenizer.chat_template.replace("('user'", "('system', 'user'")  # which has the 1 as well
    with pytest.raises(common.UserError, match=r"leaves out the message of role human \('1'\)"):
        common.render_prompt([{"role": "human", "content": "1"}], tokenizer, "1+1")


def test_a_template_that_cuts_the_default_system_prompt():
    """SmolLM3's reads "/think" in a system message as a switch, and takes it out. The default's </think> has to stay;
    a system message of the user's own may mean the switch."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{{ m.content.replace('/think', '') if m.role == 'system' else "
                               "m.content }},{% endfor %}")
    assert common.render_prompt("1", tokenizer, "") == (common.SYSTEM_PROMPT + "\n\n1,", True)
    assert common.render_prompt("1", tokenizer, "12345+67 /think") == ("12345+67 ,1,", True)


def test_a_template_that_fails():
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(common.UserError, match="^--data: .*: the chat template refuses a prompt: can only concatenate"):
        common.encode_prompts([common.Problem("1", [], "2", {})], tokenizer, encode_config(), "--data")


@pytest.mark.parametrize("begun", ["Let me think.", "Let me think. <think>", "Let me think. <think>\n"])
def test_a_last_message_of_the_assistant_is_continued(begun):
    """As R1-Zero's recipes begin the answer. A <think> that it opens is part of the answer, also in `retokenize`."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>{% endfor %}"
                               "{% if add_generation_prompt %}a:{% endif %}")
    turns = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": begun}]
    assert common.render_prompt(turns, tokenizer, "none") == (f"u:1+1=?<eos>a:{begun}", True)
    problem, = common.encode_prompts([common.Problem(turns, [], "2", {"prompt": turns})], tokenizer, SimpleNamespace(
        model="other", system_prompt="none", thinking="auto", max_prompt_tokens=99), "--data")
    assert problem.opening == begun.removeprefix("Let me think. ").removeprefix("Let me think.")
    rollout = common.Rollout(None, None, torch.ones(1, 1), ["2"], torch.tensor([True]))
    batch = common.retokenize([problem], rollout, tokenizer, "none")
    assert batch.input_ids[0].tolist() == [*problem.prompt_ids, *tokenizer("2<eos>")["input_ids"]]
    # A template that puts an empty thought before an answer has put it before the beginning of this one.
    tokenizer.chat_template = ("{% for m in messages %}{{ '<think></think>' if m['role'] == 'assistant' else '' }}"
                               "{{ m['content'] }}<eos>{% endfor %}")
    preference = common.Preference(turns, [], [" 2", "3"], [], [1.0, 0.0])
    common.encode_preferences([preference], tokenizer, SimpleNamespace(
        model="other", system_prompt="none", thinking="auto", max_prompt_tokens=99, max_completion_tokens=9), "--data")
    assert preference.rendered[0] == f"1+1=?<eos><think></think>{begun}"
    assert preference.answer_ids == [tokenizer(text)["input_ids"] for text in (" 2<eos>", "3<eos>")]
    tokenizer.chat_template = None
    assert common.render_prompt(turns, tokenizer, "none") == (f"User: 1+1=?\n\nAssistant: {begun}", False)


@pytest.mark.parametrize("begun, completion, reward", [
    ("The answer is", " 4.", 1), ("So <answer>", "4</answer>", 1), ("#### ", "5", 0),
    ("So: <think>2", "+2</think><answer>4</answer>", 1.1)])
def test_what_a_prompt_has_begun_is_part_of_the_answer(begun, completion, reward):
    turns = [{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": begun}]
    problem, = common.encode_prompts([common.Problem(turns, [], "4", {})], common.tiny_tokenizer(),
                                     encode_config(model="other"), "--data")
    rollout = common.Rollout(None, None, torch.ones(1, 1), [completion], torch.tensor([True]))
    rewards, correct = common.load_reward(SimpleNamespace(reward="verifier", format_reward=0.1))([problem], rollout)
    assert rewards.item() == pytest.approx(reward) and correct.item() == (reward > 0)


def test_a_thought_that_a_message_has_begun_stays_one():
    """Where a template ends prompts with <think>, and trims messages, as R1's and Llama 3.1's do."""
    tokenizer = chat_tokenizer("")
    tokenizer.chat_template = ("{% for m in messages %}{{ m['content'] | trim }}{% endfor %}"
                               "{% if add_generation_prompt %}<think>{% else %}<turn>{% endif %}")
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "<think> "}]
    preference = common.Preference(turns, [], ["4</think>6", "5"], [], [2.0, 1.0])
    common.encode_preferences([preference], tokenizer, encode_config(model="other"), "--data")
    problem, = common.encode_prompts([common.Problem(turns, [], "6", {"prompt": turns})], tokenizer,
                                     encode_config(model="other"), "--data")
    rollout = common.Rollout(None, None, torch.ones(1, 1), ["4</think>6"], torch.tensor([True]))
    trained, judged = preference.prompt_ids + preference.answer_ids[0], common.retokenize(
        [problem], rollout, tokenizer, "none").input_ids[0].tolist()
    assert tokenizer.decode(trained) == tokenizer.decode(judged) == "1<think>4</think>6<turn>"


def test_a_key_without_a_value_is_no_key():
    """`datasets` writes null under the keys that only other rows have."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['tool_calls'] | length if 'tool_calls' in messages[0] else 0 }}"
    turn = {"role": "user", "content": "0", "tool_calls": None}
    assert common.render_prompt([turn], tokenizer, "none") == ("0", True)


def test_a_template_may_shorten_earlier_answers():
    """As Qwen3's does, which leaves out what they thought."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }}{% endfor %}"
    turns = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))]
    assert common.render_prompt(turns, tokenizer, "none") == ("13", True)


def test_a_system_message_alone_that_the_template_refuses():
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(common.UserError, match="refuses a prompt: no system"):
        common.render_prompt([{"role": "system", "content": "1"}], tokenizer, "none")


def test_a_template_applied_to_the_data_may_begin_with_a_space():
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert common.render_prompt("\n<eos>1", tokenizer, "2") == ("\n<eos>1", False)


def test_the_system_prompt_stands_before_messages():
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
    assert common.render_prompt([{"role": "user", "content": "4"}], tokenizer, "2") == ("s2u4", True)
    assert common.render_prompt([{"role": "user", "content": "4"}], tokenizer, "", default="") == ("u4", True)
    own = [{"role": "system", "content": "3"}, {"role": "user", "content": "?!"}]  # its own, and a message of no word
    assert common.render_prompt(own, tokenizer, "2") == common.render_prompt(own, tokenizer, "") == ("s3u?!", True)


def with_bos():
    from tokenizers import processors
    tokenizer = common.tiny_tokenizer()
    tokenizer.bos_token = "<unk>"
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", tokenizer.unk_token_id)])
    return tokenizer


def test_a_string_to_sample_from_gets_its_bos():
    model, _ = random_model("Qwen2")
    tokenizer = with_bos()
    rollout = common.sample(model, tokenizer, "1+1=?", 1, 1)
    assert rollout.input_ids[0, :-1].tolist() == [tokenizer.bos_token_id, *common.tiny_tokenizer().encode("1+1=?")]


def test_the_tiny_model_reads_additions_alone():
    tokenizer = common.tiny_tokenizer()
    for prompt, system, cause in [("what is 1+1?", "", "--data"), ("what is 1+1?", "none", "--data"),
                                  ("1+1=?", "be brief", "--system_prompt")]:
        with pytest.raises(common.UserError, match=f"^{cause}: the tiny model reads digits"):
            common.encode_prompts([common.Problem(prompt, [], "2", {})], tokenizer, encode_config(system_prompt=system),
                                  "--data")
    cfg = encode_config(model="other")
    assert common.encode_prompts([common.Problem("what is 1+1?", [], "2", {})], tokenizer, cfg, "--data")


def test_a_reward_function_gets_messages_as_text():
    tokenizer = common.tiny_tokenizer()
    problem = common.Problem([{"role": "user", "content": "1"}], [], "2", {})
    common.encode_prompts([problem], tokenizer, encode_config(model="other"), "--data")
    assert problem.prompt == "User: 1\n\nAssistant:"


def test_an_empty_prompt_is_left_out(capsys):
    problems = [common.Problem(text, [], "2", {}) for text in ("", "1")]
    assert common.encode_prompts(problems, common.tiny_tokenizer(), encode_config(), "--data") == problems[1:]
    assert "left out 1 of 2" in capsys.readouterr().err


def test_a_prompt_leaves_room_for_an_answer():
    """For one token at least, where there is no --max_new_tokens."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.model_max_length = 5
    problems = [common.Problem("1" * n, [], "2", {}) for n in (4, 5)]
    assert common.encode_prompts(problems, tokenizer, encode_config(), "--data") == problems[:1]


def test_a_template_may_open_the_thinking():
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}<think>{{ '\\n' }}"  # one at its own end would be dropped
    cfg = SimpleNamespace(model="other", system_prompt="none", thinking="auto", max_prompt_tokens=99)
    problem, = common.encode_prompts([common.Problem("1", [], "2", {})], tokenizer, cfg, "--data")
    assert problem.opening == "<think>\n"


def test_the_first_row_is_shown(capsys):
    """A wrong column, or a template that stands twice, shows at a glance."""
    tokenizer, cfg = common.tiny_tokenizer(), SimpleNamespace(
        model="other", system_prompt="", thinking="auto", max_prompt_tokens=99, max_completion_tokens=99)
    common.encode_prompts([common.Problem("1" * 200, [], "0", {}), common.Problem("1+1=?", [], "2", {})], tokenizer,
                          cfg, "--data")
    assert "--data: 1 rows; the first prompt ends with '1+1=?', its answer is '2'\n" in capsys.readouterr().err
    common.encode_preferences([common.Preference("1+1=?", [], ["2", "3"], [], [1.0, 0.0])], tokenizer, cfg, "--data")
    assert "--data: 1 rows; the first prompt ends with '1+1=?', its answer is '2'\n" in capsys.readouterr().err
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    for system_prompt, said in (("", True), ("none", False), ("7", False)):  # it may be against what the task wants
        cfg = encode_config(model="other", system_prompt=system_prompt, max_prompt_tokens=999)
        common.encode_prompts([common.Problem("1+1=?", [], "2", {})], tokenizer, cfg, "--data")
        assert ("1 rows with a system prompt that asks for <think>" in capsys.readouterr().err) == said


# ------------------------------------------------------------------------------------------------- preferences

def test_the_prompt_of_a_conversation_is_all_but_its_last_turn():
    turns = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))]
    read = common.read_preference({"chosen": [*turns, {"role": "assistant", "content": "a"}],
                                   "rejected": [*turns, {"role": "assistant", "content": "b"}]})
    assert read.prompt == turns and read.answers == ["a", "b"]


def test_the_last_turn_is_the_answer():
    turn = {"role": "user", "content": "hi"}
    read = common.read_preference({"prompt": [turn], "chosen": [turn, {"role": "assistant", "content": "a"}],
                                   "rejected": [turn, {"role": "assistant", "content": "b"}]})
    assert read.answers == ["a", "b"]


@pytest.mark.parametrize("content", ["", None, "I will look."])
def test_an_answer_with_tool_calls_is_refused(content):
    """Read without them, it might be empty, and still the better one."""
    row = {"prompt": "1", "chosen": [{"role": "assistant", "content": content, "tool_calls": [{"function": {}}]}],
           "rejected": [{"role": "assistant", "content": "I do not know", "tool_calls": None}]}
    with pytest.raises(ValueError, match="tool_calls"):
        common.read_preference(row)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_a_thought_under_a_key_of_its_own_is_part_of_the_answer(key):
    read = common.read_preference({"prompt": "1", "chosen": [{"role": "assistant", "content": "a", key: "hm"}],
                                   "rejected": [{"role": "assistant", "content": "a", key: None}]})
    assert read.answers == ["<think>\nhm\n</think>\n\na", "a"]


@pytest.mark.parametrize("thought, before", [("\n4\n", "<think>\n4\n</think>\n\n"), (" ", ""), (["4"], "")])
def test_a_thought_is_a_text_that_is_not_blank(thought, before):
    assert common.with_thought({"role": "assistant", "content": "a", "reasoning": thought}) == before + "a"


def test_dialogues_may_be_in_lower_case():
    read = common.read_preference({"chosen": "human: hi assistant: a", "rejected": "human: hi assistant: b"})
    assert (read.prompt, read.answers) == ("human: hi assistant:", [" a", " b"])


def test_a_prompt_beside_conversations_of_several_turns():
    turns = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))]
    rest = {"chosen": [*turns, {"role": "assistant", "content": "a"}],
            "rejected": [*turns, {"role": "assistant", "content": "b"}]}
    for prompt in ("1", "3", turns[:1], turns):
        assert common.read_preference({"prompt": prompt, **rest}).prompt == turns
    complete = [{"role": "system", "content": "0"}, *turns]
    assert common.read_preference({"prompt": complete, **rest}).prompt == complete
    whole = {name: [complete[0], *conversation] for name, conversation in rest.items()}
    assert common.read_preference({"prompt": complete[:2], **whole}).prompt == complete  # one system message, not two
    spaced = [{**turn, "content": turn["content"] + " ", "id": 7} for turn in rest["rejected"]]
    assert common.read_preference({"prompt": "1", **rest, "rejected": spaced}).answers == ["a", "b "]
    own = {name: [{"role": "assistant", "content": "hi"}, *conversation] for name, conversation in rest.items()}
    assert common.read_preference({"prompt": "3", **own}).prompt == own["chosen"][:-1]  # the last turn, not one before
    for prompt in ("0", complete[:1] + [{"role": "user", "content": "0"}]):  # answers that go on where it ends
        later = {name: conversation[1:] for name, conversation in rest.items()}
        *known, last = common.read_preference({"prompt": prompt, **later}).prompt[:-2]
        assert last == {"role": "user", "content": "0"} and known == (complete[:1] if len(prompt) > 1 else [])
    assert common.read_preference({"prompt": "0", **rest}).prompt == turns  # they begin with a question of their own
    for name, conversation in own.items():
        conversation[1] = {**conversation[1], "content": "1"}
    assert common.read_preference({"prompt": "1 ", **own}).prompt == own["chosen"][:-1]
    for role in "user", "system":
        ends = ([*turns[:2], {"role": role, "content": text}] for text in "45")
        with pytest.raises(ValueError, match="want conversations that end with an answer"):
            common.read_preference(dict(zip(("prompt", "chosen", "rejected"), ("1", *ends))))
    with pytest.raises(ValueError, match="all but their last turns"):
        common.read_preference({"prompt": "1", **rest, "rejected": turns[1:] + rest["rejected"][-1:]})


def test_a_tie_is_no_preference():
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert common.read_preference(row | {"margin": 0}) is None and common.read_preference(row | {"tie": True}) is None
    assert common.read_preference(row | {"margin": 0.1, "tie": False}).margin == 0.1
    assert common.read_preference(row | {"status": "tie", "chosen_score": 7.0}) is None
    with pytest.raises(ValueError, match="margin must be a number of at least 0, not -1"):
        common.read_preference(row | {"margin": -1})
    for name in ("score_{}", "{}_score", "{}_rating", "{}-rating"):
        assert common.read_preference(row | {name.format("chosen"): 7.0, name.format("rejected"): 7}) is None
    for scores in ({"score_chosen": 8, "score_rejected": 7}, {"score_chosen": None, "score_rejected": None}):
        assert common.read_preference(row | scores).answers == ["a", "b"]


def test_a_score_for_each_answer():
    with pytest.raises(ValueError, match="as many numbers"):
        common.read_preference({"prompt": "p", "responses": ["a", "b"], "scores": [3, 2, 1]})
    twice = common.read_preference({"prompt": "p", "responses": ["a", "b", "a"], "scores": [1, 2, 3]})
    assert (twice.answers, twice.scores) == (["a", "b"], [3.0, 2.0])  # of equal answers the best counts


def test_the_pairs_of_a_ranking_with_a_tie():
    ranked = common.Preference("p", [7], ["a", "b", "c"], [[1], [2], [3]], [2.5, 1.0, 1.0], 0.5)
    assert [(s.answers, s.answer_ids, s.scores) for s in ranked.split()] == [
        (["a", "b"], [[1], [2]], [2.5, 1.0]), (["a", "c"], [[1], [3]], [2.5, 1.0])]
    assert [pair.margin for pair in ranked.split()] == [0.5, 0.5]


def test_an_end_that_also_pads_is_part_of_the_completion():
    batch = common.collate([[5], [0, 6]], [[7, 0], [0]], pad_id=0)
    assert batch.mask.tolist() == [[True, True], [True, False]]
    assert batch.attention_mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 0]]


def test_the_values_of_many_preferences_keep_their_order(monkeypatch):
    """Five rankings, collated two at a time. Here the value of an answer is the sum of its row: the prompt's 7 and the
    answer's 10 p + k."""
    monkeypatch.setattr(common, "AT_ONCE", 2)
    preferences = [common.Preference("p", [7], [], [[10 * p + k] for k in range(K)], list(range(K, 0, -1)))
                   for p, K in enumerate((2, 3, 2, 2, 3))]
    values = common.of_each_preference(lambda batch, blocks: (batch.input_ids * batch.attention_mask).sum(1),
                                       preferences, 0, "cpu")
    assert [v.tolist() for v in values] == [[7 + 10 * p + k for k in range(K)] for p, K in enumerate((2, 3, 2, 2, 3))]


@pytest.mark.parametrize("ended", [False, True])
def test_a_cut_answer_has_no_eos_except_for_a_reward_model(ended, capsys):
    tokenizer = common.tiny_tokenizer()
    preference = common.Preference("1", [], ["46", "123456"], [], [2.0, 1.0])
    common.encode_preferences([preference], tokenizer, encode_config(max_completion_tokens=4), "--data", ended=ended)
    assert [tokenizer.decode(ids) for ids in preference.answer_ids] == ["46<eos>", "123<eos>" if ended else "1234"]
    assert "cut 1 of 2 answers" in capsys.readouterr().err


def test_answers_that_are_equal_once_they_are_cut_make_no_pair(capsys):
    tokenizer, cfg = common.tiny_tokenizer(), encode_config(max_completion_tokens=2)
    rows = [["234", "235"], ["2", "3"], ["234", "23", "4", "235"]]
    preferences = [common.Preference("1", [], row, [], [3.0, 2.0, 1.0, 0.0][:len(row)]) for row in rows]
    kept = common.encode_preferences(preferences, tokenizer, cfg, "--data")
    assert [(p.answers, p.scores) for p in kept] == [(["2", "3"], [3.0, 2.0]), (["234", "4"], [3.0, 1.0])]
    assert [[tokenizer.decode(ids) for ids in p.answer_ids] for p in kept] == [["2<eos>", "3<eos>"], ["23", "4<eos>"]]
    assert "left out 1 of 3 rows whose answers are equal as tokens" in capsys.readouterr().err
    with pytest.raises(common.UserError, match="--data: no rows left"):
        common.encode_preferences([common.Preference("1", [], rows[0], [], [2.0, 1.0])], tokenizer, cfg, "--data")


def test_an_answer_that_brings_its_eos_gets_no_second_one():
    tokenizer = common.tiny_tokenizer()
    preference = common.Preference("1", [], ["46<eos>", "4"], [], [2.0, 1.0])
    common.encode_preferences([preference], tokenizer, encode_config(), "--data")
    assert [tokenizer.decode(ids) for ids in preference.answer_ids] == ["46<eos>", "4<eos>"]


def chat_tokenizer(ends_turn: str):
    """The tiny tokenizer with a special token <turn>, and a template that puts `ends_turn` after every message."""
    tokenizer = common.tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}" + ends_turn + "{% endfor %}"
    return tokenizer


def test_an_answer_ends_with_what_ends_a_turn():
    """Gemma's template ends turns with <end_of_turn> and a newline; its EOS ends documents."""
    tokenizer = chat_tokenizer("<turn> ")
    preference = common.Preference("1", [], ["46", "4<turn> ", "6<eos>"], [], [3.0, 2.0, 1.0])
    common.encode_preferences([preference], tokenizer, encode_config(), "--data")
    assert [tokenizer.decode(ids) for ids in preference.answer_ids] == ["46<turn>", "4<turn>", "6<turn>"]


def test_a_template_whose_prompts_begin_in_another_way_tells_nothing_about_answers():
    """And the token that ends a turn need not follow the answer at once."""
    tokenizer = chat_tokenizer(" <turn>")
    assert common.answer_form(tokenizer) == ("", "", [tokenizer.convert_tokens_to_ids("<turn>")])
    tokenizer.chat_template = "{{ '+' if add_generation_prompt else '-' }}" + tokenizer.chat_template
    assert common.answer_form(tokenizer)[:2] == ("", "")  # else all of it would be put before every answer


def test_without_a_token_that_ends_turns_eos_does():
    for ends_turn in ("", ",", "</answer>", "{{ raise_exception('no assistant') }}"):  # nothing special; an error
        assert common.turn_end(chat_tokenizer(ends_turn)) == common.tiny_tokenizer().eos_token_id


@pytest.mark.parametrize("asks, known, prompt, answers", [
    ("(", "(", "1,(", ["46<turn>", "<think>4</think>6<turn>"]),  # most: the answer follows the prompt
    ("(<think>", "(", "1,(", ["46<turn>", "<think>4</think>6<turn>"]),  # R1: its prompts open a thought
    ("(", "(<think></think>", "1,(", ["<think></think>46<turn>", "<think>4</think>6<turn>"]),  # Qwen3: an empty one
    ("(<think></think>", "(<think></think>", "1,(", ["<think></think>46<turn>", "<think>4</think>6<turn>"]),  # MiniMind
    ("(<think> ", "(<think>  </think>", "1,(", ["<think>  </think>46<turn>", "<think>4</think>6<turn>"]),  # Qwen3.5
    ("(<think>", "(</think>", "1,(", ["</think>46<turn>", "<think>4</think>6<turn>"]),  # GLM-4.7
    ("(", "(,<think></think>", "1,(", [",<think></think>46<turn>", ",<think>4</think>6<turn>"]),  # GLM-4.5
    ("(</think>", "(</think>", "1,(", ["</think>46<turn>", "<think>4</think>6<turn>"]),  # DeepSeek-V3.1
    ("{{ strftime_now('%Y-%m-%d') }}(<think>", "{{ strftime_now('%Y-%m-%d') }}(", "1,2024-07-26(",  # R1, with a date
     ["46<turn>", "<think>4</think>6<turn>"]),
    ("(", "(-", "1,(", ["-46<turn>", "-<think>4</think>6<turn>"])])  # gpt-oss: a channel
def test_an_answer_is_written_as_the_template_writes_it(asks, known, prompt, answers):
    tokenizer = chat_tokenizer("")
    tokenizer.chat_template = ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }},{% endfor %}"
                               "{% if add_generation_prompt %}" + asks + "{% else %}" + known +
                               "{{ messages[-1]['content'] }}<turn>{% endif %}")
    preference = common.Preference("1", [], [" 46", " <think>4</think>6<turn> "], [], [2.0, 1.0])
    common.encode_preferences([preference], tokenizer, encode_config(), "--data")
    assert tokenizer.decode(preference.prompt_ids) == prompt
    assert [tokenizer.decode(ids) for ids in preference.answer_ids] == answers


@pytest.mark.parametrize("asks, known, answer", [
    ("(<think> ", "(", "<think> 4</think>6<turn>"),  # R1: sampled from its prompt, an answer begins in the thought
    ("(", "(<think></think>", "<think><unk>4</think>6<turn>"),  # Qwen3 (<unk>: the newline)
    ("(", "(", "<think><unk>4</think>6<turn>")])  # a template that knows no thoughts
def test_a_thought_that_the_answer_only_ends_gets_its_beginning(asks, known, answer):
    tokenizer = chat_tokenizer("")
    tokenizer.chat_template = ("{{ messages[0]['content'] }}{% if add_generation_prompt %}" + asks + "{% else %}" +
                               known + "{{ messages[-1]['content'] }}<turn>{% endif %}")
    preference = common.Preference("1", [], ["4</think>6", "5"], [], [2.0, 1.0])
    common.encode_preferences([preference], tokenizer, encode_config(), "--data")
    cut = answer.replace("4</think>6", "5")  # also the one that was cut within the thought
    assert [tokenizer.decode(ids) for ids in preference.answer_ids] == [answer, cut]
    own = ["4</think>6", "<think>1</think>5", "4</think>6<think>"]
    preference = common.Preference("1", [], own, [], [3.0, 2.0, 1.0])
    common.encode_preferences([preference], tokenizer, encode_config(), "--data")
    assert [text.count("<think>") for text in preference.answers] == [1, 1, 2]


def test_a_prompt_that_begins_with_any_special_token_is_rendered_already():
    """Phi-3's template writes no BOS, and its <|user|> is none of the tokenizer's named special tokens."""
    from tokenizers import AddedToken
    tokenizer = chat_tokenizer("<turn>")
    tokenizer.add_tokens([AddedToken("<user>", special=True)])
    assert "<user>" not in tokenizer.all_special_tokens
    assert common.render_prompt("<user>1<turn>", tokenizer, "none") == ("<user>1<turn>", False)
    tokenizer.add_special_tokens({"bos_token": ""})  # every text begins with this one
    common.special_tokens.cache_clear()
    assert common.render_prompt("1", tokenizer, "none") == ("1<turn>", True)


def test_an_answer_begins_without_the_space_that_a_text_of_its_own_gets():
    """As SentencePiece's tokenizers put one there."""
    from tokenizers import normalizers
    tokenizer = common.tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    assert tokenizer.decode(tokenizer.encode("46")) == " 46"
    preference = common.Preference("1", [], ["46", " 4"], [], [2.0, 1.0])
    common.encode_preferences([preference], tokenizer, encode_config(), "--data")
    assert tokenizer.decode(preference.prompt_ids) == " 1"
    assert [tokenizer.decode(ids) for ids in preference.answer_ids] == ["46<eos>", " 4<eos>"]


def test_an_answer_that_merges_with_its_prompt_is_read_alone():
    """A tokenizer with a token for "++" reads "1+" and "+2" otherwise than "1++2"."""
    from tokenizers import AddedToken
    tokenizer = common.tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("++", special=False)])
    assert "++" in tokenizer.tokenize("1++2")
    preference = common.Preference("1+", [], ["+2", "3"], [], [2.0, 1.0])
    common.encode_preferences([preference], tokenizer, encode_config(), "--data")
    tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in preference.answer_ids]
    assert tokens == [["+", "2", "<eos>"], ["3", "<eos>"]]


def test_generation_stops_where_sampling_does_if_only_the_tokenizer_names_the_end(tmp_path):
    tokenizer = chat_tokenizer("<turn>")
    tokenizer.eos_token = "<turn>"
    model = random_model("Qwen2", vocab_size=len(tokenizer))[0]
    save(tmp_path, model, tokenizer)
    policy, tokenizer = common.load_policy(policy_config(tmp_path), cpu)
    assert tokenizer.convert_tokens_to_ids("<turn>") in policy.generation_config.eos_token_id


def test_sampling_stops_where_the_chat_template_ends_a_turn(tmp_path):
    """Qwen2.5's base models have a chat template, but a generation config in which only documents end."""
    tokenizer = chat_tokenizer("<turn>")
    model = random_model("Qwen2", vocab_size=len(tokenizer))[0]
    save(tmp_path, model, tokenizer)
    policy, tokenizer = common.load_policy(policy_config(tmp_path), cpu)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<turn>")]
    assert common.eos_ids(policy, tokenizer) == policy.generation_config.eos_token_id == ends


@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', '{"eos_token_id": [1'])
def test_an_eos_that_is_no_token(content, tmp_path):
    save_random(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(common.UserError, match="its generation_config.json is not usable"):
        common.load_policy(policy_config(tmp_path), cpu)


def test_a_model_whose_own_generation_config_could_not_be_saved(tmp_path):
    """A temperature without do_sample, as Vicuna has it, is an error to transformers once anything else has changed."""
    save_random(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.9, "top_p": 0.6, "top_h": 0.4, "max_length": 99}')
    common.save_model(*common.load_policy(policy_config(tmp_path), cpu), tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert saved["max_length"] == 99 and not {"temperature", "top_p", "top_h"} & saved.keys()
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.9, "top_p": 0.6}')
    config = common.load_policy(policy_config(tmp_path), cpu)[0].generation_config  # a chat model's: these have one
    assert (config.temperature, config.top_p) == (0.9, 0.6)


def test_no_bos_stands_between_prompt_and_answer():
    tokenizer = with_bos()
    preference = common.Preference("1", [], ["46", "4"], [], [2.0, 1.0])
    cfg = SimpleNamespace(model="x", system_prompt="", thinking="auto", max_prompt_tokens=99, max_completion_tokens=99)
    common.encode_preferences([preference], tokenizer, cfg, "--data")
    assert preference.prompt_ids[0] == tokenizer.bos_token_id
    assert [tokenizer.decode(ids) for ids in preference.answer_ids] == ["46<eos>", "4<eos>"]


def test_preferences_have_no_default_system_prompt():
    tokenizer = common.tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    preference = common.Preference("1", [], ["2", "3"], [], [2.0, 1.0])
    common.encode_preferences([preference], tokenizer, encode_config(system_prompt=""), "--data")
    assert tokenizer.decode(preference.prompt_ids) == "1"


def test_numpys_numbers_are_numbers():
    assert all(map(common.is_number, (1, 0.5, np.float32(0.5), np.int64(3), np.bool_(True))))


def test_without_eval_data_the_script_says_so(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    cfg = common.RunConfig(data=str(tmp_path / "rows.jsonl"))
    cfg.reward, cfg.warmup_steps, cfg.steps = "verifier", 0, 1
    assert list(map(len, common.read_train_and_eval(cfg))) == [1, 0]
    common.warn_of_flags(cfg)
    assert "no --eval_data" in capsys.readouterr().err
    cfg.eval_problems = cfg.data  # of dpo.py
    common.warn_of_flags(cfg)
    assert "no --eval_data" not in capsys.readouterr().err
