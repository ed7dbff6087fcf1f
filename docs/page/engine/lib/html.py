"""html.escape."""


def escape(text, quote=True):
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace(chr(34), "&quot;").replace(chr(39), "&#x27;") if quote else text
