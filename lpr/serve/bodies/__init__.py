"""Bodies of requests as pydantic models. Unknown fields are refused by their names, never ignored.

Fields that some client always sends, and of which only one value can be honoured, are literals of that value.
"""
