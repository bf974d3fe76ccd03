"""`python -m stretto`, which torchrun needs: `torchrun --nproc-per-node 2 -m stretto train …`."""

from stretto.cli import main

if __name__ == "__main__":
    main()
