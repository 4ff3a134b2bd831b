"""Function tools of verl's kind; verl keeps one list of them in a process, so no other test may use these names."""

from verl.tools.function_tool import function_tool


@function_tool
def plus(a: int, b: int = 1):
    """Adds two numbers.

    Args:
        a: a number.
        b: another one.
    """
    return str(a + b)


@function_tool
async def look_up(query: str):
    """Finds passages.

    Args:
        query: text to look for.
    """
    return f"found {query}"
