"""The reward model: its losses on hand-worked numbers, scores that padding does not change, and whole runs."""
import functools
import itertools
import json
import math

import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import common
import reward_model
from helpers import (assert_metrics, assert_same_weights, begin_with, plain_update, random_model, read_metrics,
                     record_run, run_script, save)


def test_preference_loss_by_hand():
    """Scores 2 and 1: −log σ(2 − 1) = .31326; with margin 1: −log σ(2 − 1 − 1) = ln 2.

    A pair that is wrong by 9,000 has the loss 9,000 and the slope −1 (½ in a mean over two); one that is right by so
    much has neither.
    """
    loss, stats = reward_model.preference_loss(torch.tensor([2.0]), torch.tensor([1.0]))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)))
    assert stats["pair_accuracy"] == 1 and stats["margin"] == 1
    loss, _ = reward_model.preference_loss(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([1.0]))
    assert loss.item() == pytest.approx(math.log(2))
    chosen = torch.tensor([-9e3, 9e3], requires_grad=True)
    loss, _ = reward_model.preference_loss(chosen, torch.zeros(2))
    loss.backward()
    assert loss == 4500 and chosen.grad.tolist() == [-0.5, 0]
    _, stats = reward_model.preference_loss(*torch.ones(2, 3, requires_grad=True))
    assert not any(value.requires_grad for value in stats.values())  # metrics keep no graph


def test_a_column_of_scores_is_read_as_one_per_pair():
    """A classifier's logits are [B, 1]; with a margin [B], or less scores [B], they would broadcast to [B, B]."""
    chosen, rejected, margin = torch.tensor([2.0, 0]), torch.tensor([1.0, 3]), torch.tensor([0.0, 1])
    expected, _ = reward_model.preference_loss(chosen, rejected, margin)
    for scores in ((chosen[:, None], rejected[:, None]), (chosen[:, None], rejected)):
        for gap in (margin, margin[:, None]):
            torch.testing.assert_close(reward_model.preference_loss(*scores, gap)[0], expected)


def test_ranking_loss_is_the_mean_over_all_pairs():
    torch.manual_seed(0)
    rewards = torch.randn(3, 4)
    expected = [-torch.nn.functional.logsigmoid(row[i] - row[j]) for row in rewards
                for i, j in itertools.combinations(range(4), 2)]
    assert len(expected) == 3 * 6
    torch.testing.assert_close(reward_model.ranking_loss(rewards)[0], torch.stack(expected).mean())


def test_ties_make_no_pair():
    """Scores 1, 1, 0: two of the three pairs remain, without the one of the two right answers."""
    preference = common.read_preference({"prompt": "p", "responses": ["c", "a", "b"], "scores": [0, 1, 1]})
    assert preference.answers == ["a", "b", "c"] and preference.pairs == [(0, 2), (1, 2)]
    assert common.read_preference({"prompt": "p", "responses": ["a", "b"], "scores": [1, 1]}) is None
    ranked = common.read_preference({"prompt": "p", "responses": ["a", "b", "c"]})
    assert ranked.pairs == [(0, 1), (0, 2), (1, 2)]


def test_what_could_turn_an_order_round():
    """chosen and rejected say it all; scores of responses have to be called so."""
    for more in ({"responses": ["b", "a"]}, {"scores": [1, 5]}, {"rewards": [1, 5]}):
        assert common.read_preference({"prompt": "p", "chosen": "a", "rejected": "b", **more}).answers == ["a", "b"]
    for name in ("rewards", "ratings", "rank", "score", "overall_scores"):
        with pytest.raises(ValueError, match=f"{name} beside responses"):
            common.read_preference({"prompt": "p", "responses": ["a", "b"], name: [1, 5]})
    for name, value in ("labels", [0, 1]), ("label", 1), ("preference", 1.0), ("best", 1):
        with pytest.raises(ValueError, match=f"{name} beside responses"):
            common.read_preference({"prompt": "p", "responses": ["a", "b"], name: value})
    assert common.read_preference({"prompt": "p", "responses": ["a", "b"], "label": "math", "score": 5}).pairs
    best_twice = {"prompt": "p", "chosen": "a", "rejected": None, "responses": ["a", "b"], "rank": None}
    assert common.read_preference(best_twice).answers == ["a", "b"]


def test_calibration_error():
    """At Δ ≈ 0, the confidence σ(|Δ|) is .5: calibrated if half of the pairs are right, off by .5 if all are."""
    assert reward_model.calibration_error(torch.tensor([1e-9, -1e-9])) == pytest.approx(0.0, abs=1e-6)
    assert reward_model.calibration_error(torch.tensor([1e-9, 1e-9])) == pytest.approx(0.5, abs=1e-6)
    assert reward_model.calibration_error(torch.zeros(3)) == pytest.approx(0.0, abs=1e-6)  # ties are half right
    assert reward_model.calibration_error(torch.full((4,), 50.0)) == pytest.approx(0.0, abs=1e-6)
    assert math.isnan(reward_model.calibration_error(torch.tensor([50.0, math.nan])))  # of a run that fails
    # A right pair at confidence .62 and a wrong one at .68 fall into two bins of width .05: ½·.38 + ½·.68.
    assert reward_model.calibration_error(torch.tensor([0.62, 0.32]).logit()) == pytest.approx(0.53, abs=1e-6)
    # At .92 and 1 − .03 = .97, these are the last two bins: ½·.08 + ½·.97.
    assert reward_model.calibration_error(torch.tensor([0.92, 0.03]).logit()) == pytest.approx(0.525, abs=1e-6)


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama", "GPT2", "Gemma2"])
def test_padding_does_not_move_a_score(architecture, tmp_path):
    """Padded left and right, with pad = EOS, a row has the same score as alone: the one at its last token, the EOS."""
    model, tokenizer = random_model(architecture)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    eos = tokenizer.eos_token_id
    rows = [tokenizer.encode(text) + [eos] for text in ("12+34=?46", "7", "1+1=?2,2")]
    alone = [common.sequence_scores(scorer, torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long))
             for row in rows]
    for left in (0, 3):
        width = max(map(len, rows)) + left + 2
        ids = torch.tensor([[eos] * left + row + [eos] * (width - left - len(row)) for row in rows])
        mask = torch.tensor([[0] * left + [1] * len(row) + [0] * (width - left - len(row)) for row in rows])
        torch.testing.assert_close(common.sequence_scores(scorer, ids, mask), torch.cat(alone), rtol=1e-4, atol=1e-5)
    # On a GPU, the model computes in bfloat16. The scores stay in float32: rounded to eight bits, close ones would tie.
    scores = common.sequence_scores(scorer.bfloat16(), ids, mask)
    assert (scores != scores.bfloat16()).any()


ROWS = [{"prompt": "12+34=?", "chosen": "46", "rejected": "64,64", "margin": 0.5},
        {"prompt": "1+1=?", "responses": ["2", "1+1=2", "11", "3,3,3,3"]},
        {"prompt": "5+5=?", "responses": ["10", "0", "55", "5,5"], "scores": [1, 0, 0, 0]}]


def random_gemma_3():
    """It also reads images; what concerns text stands in a `text_config`, which here names no pad token."""
    language_model, tokenizer = random_model("Gemma3Text", head_dim=8)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8,
                  patch_size=4)
    text = {**language_model.config.to_dict(), "pad_token_id": None}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config), tokenizer


@pytest.fixture
def run_step(tmp_path):
    """run_step(architecture, *flags) -> output directory of a run: one step on all ROWS, lr = 0, pad = EOS."""
    def run(architecture, *flags):
        model, tokenizer = random_model(architecture) if architecture != "Gemma3" else random_gemma_3()
        tokenizer.pad_token = tokenizer.eos_token
        save(tmp_path / "base", model, tokenizer)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        run_script("reward_model.py", "--model", tmp_path / "base", "--data", tmp_path / "rows.jsonl", "--steps", 1,
                   "--pairs_per_step", 3, "--lr", 0, "--overwrite", "--output_dir", tmp_path / "run", *flags)
        return tmp_path / "run"
    return run


@pytest.mark.parametrize("max_tokens", [1, 40, 100_000])
def test_the_step_is_the_mean_over_its_pairs_for_any_micro_batch(run_step, max_tokens):
    """Three rows with 2, 4 and 4 answers make 1 + 6 + 3 pairs: each weighs 1/10 in any micro-batch."""
    directory = run_step("Llama", "--micro_batch_tokens", max_tokens, "--center_coef", 0.1)
    model = AutoModelForSequenceClassification.from_pretrained(directory / "model", num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    losses, sums = [], []
    for row in ROWS:
        answers = row.get("responses") or [row["chosen"], row["rejected"]]
        rows = [tokenizer.encode(row["prompt"] + text) + [tokenizer.eos_token_id] for text in answers]
        r = [model(torch.tensor([ids])).logits[0, 0] for ids in rows]  # the score of each answer
        pairs = [(0, 1), (0, 2), (0, 3)] if "scores" in row else list(itertools.combinations(range(len(r)), 2))
        sums += [r[i] + r[j] for i, j in pairs]
        losses += [-torch.nn.functional.logsigmoid(r[i] - r[j] - row.get("margin", 0.0)) for i, j in pairs]
    assert len(losses) == 10
    loss = torch.stack(losses).mean() + 0.1 * torch.stack(sums).square().mean()
    model.zero_grad()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert 0.5 < model.score.weight.std() * math.sqrt(model.config.hidden_size + 1) < 2  # a fresh head, rescaled
    step = read_metrics(directory)[-1]
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_every_update_is_that_of_the_plain_algorithm(tmp_path, monkeypatch):
    """Four updates of two rows each. The model to start from has a scalar head already, which is not rescaled."""
    language_model, tokenizer = random_model("Llama")
    language_model.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    model, start = (AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1).eval()
                    for _ in range(2))
    start.load_state_dict(model.state_dict())
    save(tmp_path / "base", model, tokenizer)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    steps = record_run(
        monkeypatch, "reward_model.py", tmp_path / "run", "--model", tmp_path / "base",
        "--data", tmp_path / "rows.jsonl", "--eval_data", tmp_path / "held_out.jsonl", "--steps", 4,
        "--pairs_per_step", 2, "--center_coef", 0.1, "--lr", 1e-3, "--warmup_steps", 2, "--max_grad_norm", 0.5,
        "--micro_batch_tokens", 60)

    def pairs_of(row):
        """[(score of the better answer, score of the worse one, margin), …] for all pairs, without padding."""
        answers = row.get("responses") or [row["chosen"], row["rejected"]]
        texts = [tokenizer.encode(row["prompt"] + answer) + [tokenizer.eos_token_id] for answer in answers]
        scores = [model(torch.tensor([text])).logits[0, 0] for text in texts]
        order = row.get("scores", [-i for i in range(len(answers))])
        return [(scores[i], scores[j], row.get("margin", 0.0))
                for i, j in itertools.permutations(range(len(answers)), 2) if order[i] > order[j]]

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step, lr in zip(steps, (0.0, 0.5e-3, 1e-3, 0.5e-3), strict=True):  # two updates of warm-up, then linear decay
        begin_with(step, 0, (model, optimizer))
        [drawn] = step.batches
        row_of = {row["prompt"]: row for row in ROWS}
        pairs = [pair for preference in drawn for pair in pairs_of(row_of[preference.prompt])]
        loss = sum(-(better - worse - margin).sigmoid().log() + 0.1 * (better + worse) ** 2
                   for better, worse, margin in pairs) / len(pairs)
        differences = torch.stack([better - worse for better, worse, _ in pairs]).detach()
        updates = [plain_update(optimizer, loss, lr, 0.5)]
        assert step.updates == [pytest.approx(update, rel=2e-3, abs=1e-5) for update in updates]
        assert_metrics(step, updates, {"pair_accuracy": (differences > 0).float().mean(), "margin": differences.mean()})
    assert_same_weights(tmp_path / "run", model, start)
    held_out = torch.stack([better - worse for row in ROWS[:2] for better, worse, _ in pairs_of(row)]).detach()
    assert_metrics(step, updates, {"eval_margin": held_out.mean(), "eval_pair_accuracy": (held_out > 0).float().mean(),
                                   "eval_loss": -held_out.sigmoid().log().mean(),
                                   "eval_calibration_error": reward_model.calibration_error(held_out)})


@pytest.mark.parametrize("architecture", ["Qwen2", "GPT2", "Gemma3"])
def test_plain_transformers_reads_the_same_scores_from_the_saved_model(run_step, architecture):
    """One by one, in a padded batch, although the pad token was the EOS, and through a pipeline; reward_shift is the
    mean score of the best answers."""
    directory = run_step(architecture)
    model = AutoModelForSequenceClassification.from_pretrained(directory / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    texts = ["12+34=?46", "1+1=?2", "5+5=?10"]
    rows = [tokenizer.encode(text) + [tokenizer.eos_token_id] for text in texts]
    padded = tokenizer.pad([{"input_ids": row} for row in rows], return_tensors="pt", padding_side="right")
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([row])).logits[:, 0] for row in rows])
        together = model(**padded).logits[:, 0]
    own = common.sequence_scores(model, padded["input_ids"], padded["attention_mask"])
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, own.detach(), rtol=1e-4, atol=1e-5)
    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    piped = pipe([text + tokenizer.eos_token for text in texts], add_special_tokens=False, batch_size=3)
    torch.testing.assert_close(torch.tensor([found["score"] for found in piped]), alone, rtol=1e-4, atol=1e-5)
    assert model.config.reward_system_prompt == ""
    assert model.config.num_labels == 1 and model.config.reward_shift == pytest.approx(alone.mean().item(), rel=1e-4)


def test_calibration_error_weighs_bins_by_size_and_certainty_joins_the_last_bin():
    """Three right pairs at confidence .62 and a wrong one at .68: (3·.38 + .68) / 4 = .455.

    A wrong pair at confidence 1 and a right one at .98 share the last bin: |.99 − .5|.
    """
    differences = torch.tensor([0.62, 0.62, 0.62, 0.32]).logit()
    assert reward_model.calibration_error(differences) == pytest.approx(0.455, abs=1e-6)
    last = (1 + torch.sigmoid(torch.tensor(4.0)).item()) / 2  # mean confidence of the last bin
    assert reward_model.calibration_error(torch.tensor([-50.0, 4.0])) == pytest.approx(last - 0.5, abs=1e-6)


def test_the_saved_config_says_with_which_system_prompt_it_has_learned(monkeypatch):
    model, tokenizer = random_model("Qwen2")
    monkeypatch.setattr(reward_model, "answer_scores", lambda *_: [torch.tensor([3.0, 0.0]), torch.tensor([1.0, -5.0])])
    cfg = reward_model.Config(system_prompt="7")
    reward_model.complete_config(model, tokenizer, common.Shuffled([1, 2], 0), cfg, "cpu")
    assert (model.config.reward_system_prompt, model.config.reward_shift) == ("7", 2.0)


def test_only_a_fresh_head_is_rescaled():
    """H = 32: the std of 0.05 becomes 1/√33. A head that came with the checkpoint stays as it is."""
    config = random_model("Llama")[0].config
    config.num_labels, config.initializer_range = 1, 0.05
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    for kind, factor in (("ForSequenceClassification", 1), ("ForCausalLM", 33 ** -0.5 / 0.05)):
        model.config.architectures, before = [f"Llama{kind}"], model.score.weight.detach().clone()
        reward_model.scale_fresh_head(model)
        torch.testing.assert_close(model.score.weight, before * factor)


def test_a_tie_is_not_right_in_training_and_half_right_in_the_evaluation(monkeypatch):
    assert reward_model.preference_loss(torch.ones(1), torch.ones(1))[1]["pair_accuracy"] == 0
    tokenizer, cfg = common.tiny_tokenizer(), reward_model.Config()
    rows = [{"prompt": "1+1=?", "chosen": "2", "rejected": "11"},  # each pair both ways round
            {"prompt": "1+1=?", "chosen": "11", "rejected": "2"},
            {"prompt": "12+34=?", "chosen": "46", "rejected": "4"},
            {"prompt": "12+34=?", "chosen": "4", "rejected": "46"}]
    preferences = common.encode_preferences([common.read_preference(row) for row in rows], tokenizer, cfg, "--data")
    model, _ = random_model("Qwen2")
    model.config.num_labels = 1
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_config(model.config).eval()
    torch.nn.init.normal_(scorer.score.weight)

    def evaluate(preferences):
        return reward_model.evaluate(scorer, tokenizer, preferences, cfg, "cpu")

    metrics = evaluate(preferences)
    assert metrics["eval_pair_accuracy"] == 0.5 and metrics["eval_margin"] == pytest.approx(0, abs=1e-6)
    one_way = evaluate(preferences[::2])
    assert one_way["eval_margin"] != pytest.approx(0, abs=1e-3)
    monkeypatch.setattr(common, "AT_ONCE", 1)  # several collations
    assert evaluate(preferences[::2]) == pytest.approx(one_way, abs=1e-5)
    torch.nn.init.zeros_(scorer.score.weight)  # all pairs tie
    assert evaluate(preferences)["eval_pair_accuracy"] == 0.5


def test_the_pad_token_to_save_is_a_special_one_and_never_the_eos():
    tokenizer = common.tiny_tokenizer()
    assert common.pad_unlike_eos(tokenizer) == common.tiny_tokenizer().pad_token_id  # has its own
    tokenizer.pad_token = tokenizer.eos_token
    pad = common.pad_unlike_eos(tokenizer)
    assert tokenizer.added_tokens_decoder[pad].special and pad == tokenizer.pad_token_id != tokenizer.eos_token_id
    tokenizer = common.tiny_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token  # the first special token
    assert common.pad_unlike_eos(tokenizer) == tokenizer.pad_token_id != tokenizer.eos_token_id
    for end in ("<unk>", "<pad>"):  # what ends answers: the last special token, or the first
        tokenizer = common.tiny_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}" + end + "{% endfor %}"
        tokenizer.pad_token = end
        ends = common.turn_end(tokenizer), tokenizer.eos_token_id
        assert ends[0] == tokenizer.convert_tokens_to_ids(end) != ends[1]
        assert common.pad_unlike_eos(tokenizer) not in ends


def test_the_saved_pad_token_is_that_of_config_and_tokenizer(tmp_path):
    """If the base's config pads with the EOS too, transformers would read scores before it."""
    model, tokenizer = random_model("Llama")
    tokenizer.pad_token, model.config.pad_token_id = tokenizer.eos_token, tokenizer.eos_token_id
    save(tmp_path / "base", model, tokenizer)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=?", "chosen": "2", "rejected": "3"}\n')
    run_script("reward_model.py", "--steps", 1, "--pairs_per_step", 1, "--data", tmp_path / "pairs.jsonl",
               "--model", tmp_path / "base", "--output_dir", tmp_path / "run")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "run" / "model")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert config.pad_token_id == saved.pad_token_id != saved.eos_token_id


def test_a_pad_token_of_its_own_stays_and_without_special_tokens_a_rare_one_pads():
    from tokenizers import Tokenizer, models
    tokenizer = common.tiny_tokenizer()
    tokenizer.pad_token = tokenizer.unk_token
    assert common.pad_unlike_eos(tokenizer) == tokenizer.unk_token_id
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, unk_token="a"))
    bare = common.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    assert common.pad_unlike_eos(bare) == 2 == bare.pad_token_id
    backend = Tokenizer(models.WordLevel({"!": 0, "a": 1, "<eos>": 2}, unk_token="a"))  # GPT-2's order: "!" is not rare
    bare = common.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    assert common.pad_unlike_eos(bare) == 1


@pytest.mark.parametrize("architecture", ["Granite", "Mamba", "Llama4Text", "FalconH1"])
def test_an_architecture_without_a_classifier_gets_one(architecture, tmp_path):
    """The score is the head's on the language model's last hidden state, also after saving and loading."""
    model, tokenizer = random_model(architecture)
    model.save_pretrained(tmp_path / "model")
    ids = torch.tensor([tokenizer.encode("12+34=?")])
    load = functools.partial(common.load_model, device=torch.device("cpu"), cls=AutoModelForSequenceClassification)
    scorer = load(str(tmp_path / "model"), num_labels=1)
    body = getattr(model, "model", model.base_model)  # Llama 4's base_model is the whole model
    score = scorer.score(body(ids).last_hidden_state[0, -1])
    torch.testing.assert_close(common.sequence_scores(scorer, ids, torch.ones_like(ids)), score)
    scorer.save_pretrained(tmp_path / "scorer")
    again = load(str(tmp_path / "scorer"), trainable=False)
    torch.testing.assert_close(common.sequence_scores(again, ids, torch.ones_like(ids)), score)
