# SPDX-License-Identifier: Apache-2.0
"""Python's structs have the sizes and offsets of C's, and `import ballast` needs no torch."""
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import ballast
from ballast import _library as lib

SOURCE = Path(__file__).resolve().parents[2]
STRUCTS = {"bl_tensor": lib.Tensor, "bl_linear_lora": lib.Lora, "bl_linear_spec": lib.Spec,
           "bl_linear_options": lib.Options, "bl_linear_call": lib.Call,
           "bl_linear_memory": lib.Memory, "bl_linear_stats": lib.Stats,
           "bl_comm_processes": lib.Processes, "bl_session_row": lib.SessionRow,
           "bl_session_loss": lib.SessionLoss, "bl_session_result": lib.SessionResult,
           "bl_session_step": lib.SessionStep, "bl_session_sampling": lib.SessionSampling,
           "bl_session_stats": lib.SessionStats}


class Structs(unittest.TestCase):
    def test_layouts(self):
        lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "ballast.h"',
                 '#include "ballast_session.h"',
                 "int main(void) {"]
        want = []
        for name, mirror in STRUCTS.items():
            lines.append(f'printf("%zu\\n", sizeof({name}));')
            want.append(ctypes.sizeof(mirror))
            for field, _ in mirror._fields_:
                lines.append(f'printf("%zu\\n", offsetof({name}, {field}));')
                want.append(getattr(mirror, field).offset)
        for name, code in lib.DTYPES.items():
            short = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[name]
            lines.append(f'printf("%zu\\n", (size_t)BL_{short});')
            want.append(code)
        with tempfile.TemporaryDirectory() as work:
            Path(work, "layout.c").write_text("\n".join(lines + ["}"]))
            subprocess.run(["cc", "-I", str(SOURCE / "src"), "-o", work + "/layout",
                            work + "/layout.c"], check=True)
            found = subprocess.run([work + "/layout"], check=True, stdout=subprocess.PIPE).stdout
        self.assertEqual([int(n) for n in found.split()], want)

    def test_library(self):
        library = lib.load()
        self.assertTrue(library.bl_version().decode().startswith(lib.ABI))
        self.assertEqual(ballast.__version__, library.bl_version().decode())
        with self.assertRaisesRegex(AttributeError, "no attribute 'nothing'"):
            ballast.nothing
        with self.assertRaisesRegex(ValueError, "options is NULL"):
            lib.check(library.bl_linear_stack_create(None, 1, None, ctypes.byref(ctypes.c_void_p())))

    def test_package_needs_no_torch(self):
        code = ("import sys; sys.modules['torch'] = None; import ballast, json; "
                "print(json.dumps(ballast.plan('llama-3.1-8b', '8xh100')))")
        program = Path(os.environ["BALLAST_LIBRARY"]).parent / "ballast"
        found = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE,
                               env={**os.environ, "BALLAST_PROGRAM": str(program)}).stdout
        self.assertIsInstance(json.loads(found), dict)


if __name__ == "__main__":
    unittest.main()
