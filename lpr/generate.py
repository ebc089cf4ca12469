"""`python -m lpr.generate`, alone or under torchrun: complete prompts from a file, or show what lpr does."""

try:
    from lpr.cli.generate import main
    from lpr.dist.runtime import leave
except KeyboardInterrupt:  # of the seconds in which torch is imported
    raise SystemExit(130) from None

if __name__ == "__main__":
    leave(main())
