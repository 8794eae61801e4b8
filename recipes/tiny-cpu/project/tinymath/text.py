"""Functions of texts."""


def shout(text):
    """Return the text in capitals with an exclamation mark."""
    return text.upper() + "!"


def repeat(text, times):
    """Return the text several times, one space between."""
    return " ".join([text] * times)


def initials(name):
    """Return the first letter of each word, as capitals."""
    return "".join(word[0].upper() for word in name.split())


def is_palindrome(text):
    """Tell whether the letters read the same backwards, without regard to case."""
    letters = [letter.lower() for letter in text if letter.isalpha()]
    return letters == letters[::-1]
