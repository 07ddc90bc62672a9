"""The check of the built site finds what a browser would load from elsewhere."""

from scripts.check_site import outside_resources


def test_outside_resources_are_found(tmp_path):
    (tmp_path / "page.html").write_text(
        '<link rel="stylesheet" href="a.css"><script src="https://cdn.example/x.js"></script>'
        '<img src="//example/y.png"><img src="z.png"><a href="https://example.org">fine</a>'
        "<p style=\"background: url('https://example/b.png')\"></p><style>@import 'http://example/c.css';</style>"
    )
    (tmp_path / "a.css").write_text("body { background: url(https://example/d.png) } p { background: url(e.png) }")
    assert outside_resources(tmp_path) == [
        "page.html: https://cdn.example/x.js",
        "page.html: //example/y.png",
        "page.html: https://example/b.png",
        "page.html: http://example/c.css",
        "a.css: https://example/d.png",
    ]
