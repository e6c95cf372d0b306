"""Buffers that nobody reads are found, and nothing else."""

from kit.analysers.lost_buffers import lost_buffers

KERNEL = """
    %notes = ttg.local_alloc : () -> !ttg.memdesc<4x64xi32, #smem, mutable>
    %notes_0 = ttg.local_alloc : () -> !ttg.memdesc<64xi32, #smem, mutable>
    ttng.async_tma_copy_global_to_local %records[%c0, %c0] %notes_0, %full, %true
"""


def test_a_buffer_that_no_partition_uses_is_found() -> None:
    assert lost_buffers(KERNEL + "ttg.warp_specialize(%notes, %full)") == ["%notes_0"]
    assert lost_buffers(KERNEL + "ttg.warp_specialize(%notes_0, %full)") == ["%notes"]


def test_a_buffer_of_a_partition_is_not() -> None:
    passed = "ttg.warp_specialize(%notes) default {\n ttg.local_load %notes_0 \n}"
    assert lost_buffers(KERNEL + passed) == []
    assert lost_buffers(KERNEL) == []
