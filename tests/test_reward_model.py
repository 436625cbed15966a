"""The reward model's losses by hand, and a score that padding does not move."""
import itertools
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import common
import reward_model
from helpers import random_model


def test_preference_loss_by_hand():
    """Scores 2 and 1: −log σ(1) = .31326; with margin 1: −log σ(0) = ln 2."""
    loss, stats = reward_model.preference_loss(torch.tensor([2.0]), torch.tensor([1.0]))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1))) and stats["pair_accuracy"] == 1 and stats["margin"] == 1
    loss, _ = reward_model.preference_loss(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([1.0]))
    assert loss.item() == pytest.approx(math.log(2))
    loss, _ = reward_model.preference_loss(torch.tensor([-9e3, 9e3]), torch.zeros(2))
    assert loss.isfinite()


def test_ranking_loss_is_the_mean_over_all_pairs():
    torch.manual_seed(0)
    rewards = torch.randn(3, 4)
    expected = [-torch.nn.functional.logsigmoid(row[i] - row[j]) for row in rewards
                for i, j in itertools.combinations(range(4), 2)]
    assert len(expected) == 3 * 6
    torch.testing.assert_close(reward_model.ranking_loss(rewards)[0], torch.stack(expected).mean())


def test_calibration_error():
    """Δ = 0 is σ = .5: preferred half of the time it is calibrated, always preferred it is off by .5."""
    assert reward_model.calibration_error(torch.tensor([1e-9, -1e-9])) == pytest.approx(0.0, abs=1e-6)
    assert reward_model.calibration_error(torch.tensor([1e-9, 1e-9])) == pytest.approx(0.5, abs=1e-6)
    assert reward_model.calibration_error(torch.full((4,), 50.0)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("architecture", ["Qwen2", "Llama", "GPT2", "Gemma2"])
def test_padding_does_not_move_a_score(architecture, tmp_path):
    """Left and right padding, pad = EOS: the score is that of the row alone, at its last token, the EOS."""
    model, tokenizer = random_model(architecture)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    eos = tokenizer.eos_token_id
    rows = [tokenizer.encode(text) + [eos] for text in ("12+34=?46", "7", "1+1=?2,2")]
    alone = [common.sequence_scores(scorer, torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long)) for row in rows]
    for left in (0, 3):
        width = max(map(len, rows)) + left + 2
        ids = torch.tensor([[eos] * left + row + [eos] * (width - left - len(row)) for row in rows])
        mask = torch.tensor([[0] * left + [1] * len(row) + [0] * (width - left - len(row)) for row in rows])
        torch.testing.assert_close(common.sequence_scores(scorer, ids, mask), torch.cat(alone), rtol=1e-4, atol=1e-5)
