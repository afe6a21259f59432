"""An HTML page as parsed by a test."""

from html.parser import HTMLParser

VOID = {"meta", "path", "use", "rect"}


class Reader(HTMLParser):
    """The text, classes and attributes of a page; fails if tags are not closed in order."""

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
