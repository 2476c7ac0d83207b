"""DSPy programs and their tools; imported as `modpo.programs`."""

if __name__ != "modpo.programs":
    raise ImportError(f"import modpo.programs, not {__name__!r}: under two names each class would exist twice")
