"""The model card of the shipped policy is generated from its file."""

from scripts.model_card import PAGE, card, updated


def test_model_card_is_up_to_date():
    assert updated(PAGE.read_text()) == PAGE.read_text(), "run python scripts/model_card.py"


def test_model_card_shows_ranges_of_training():
    text = card()
    assert "| slots in training | 3 to 6 |" in text
    assert "`general`, 21,840 epochs of real hosts" in text
    assert "| `time` | env | 0.000 | 0.975 | 0 to 1 |" in text
