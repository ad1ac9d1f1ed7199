"""`python -m nandoctor`."""

from nandoctor.cli import main

if __name__ == "__main__":
    main()
