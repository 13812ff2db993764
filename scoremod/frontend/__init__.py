"""From the user's text to the IR: Python functions and the mini-language, with places kept."""
