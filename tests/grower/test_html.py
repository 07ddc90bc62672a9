"""HTML tables for notebooks: growers, reports and worth."""

import torch
from torch import nn

import esper


def test_grower_report_and_worth_are_tables_with_hostile_names_escaped():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
    body = esper.graft(model, at={"<img onerror=alert(1)>": "1"}, probe=x)
    grower = esper.Grower(body, torch.optim.SGD(body.parameters(), lr=0.1), controller="none")
    grower.germinate("<img onerror=alert(1)>", "mlp_small")
    pages = [each._repr_html_() for each in (grower.step([(x, y)]), grower, grower.worth([(x, y)]))]
    for html in pages:
        assert html.count("<table") == 1
        assert "<img" not in html
    assert "&lt;img onerror=alert(1)&gt;" in pages[1]
    assert "BLENDING" in pages[1] or "HOLDING" in pages[1]
    assert "contribution" in pages[2]
