"""Function tools of verl's kind."""

from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int = 1):
    """Adds two numbers.

    Args:
        a: a number.
        b: another one.
    """
    return str(a + b)


@function_tool
async def search(query: str):
    """Finds passages.

    Args:
        query: text to look for.
    """
    return f"found {query}"
