"""Convert a model to the folder that mlx-lm and mlx-specstream load (docs/convert.md).

python scripts/convert.py --hf-path a/folder-or-hub-id --mlx-path out -q --q-bits 4
"""

from mlx_specstream.conversion.command import main

if __name__ == "__main__":
    main()
