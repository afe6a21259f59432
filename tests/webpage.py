"""A page as a test reads it."""

from html.parser import HTMLParser

VOID = {"meta", "line", "rect", "circle", "polyline"}


class Reader(HTMLParser):
    """The text, the classes and the attributes of a page; fails where tags do not close as they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words, self.attributes = "", []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *one) for one in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data):
        self.words += data
