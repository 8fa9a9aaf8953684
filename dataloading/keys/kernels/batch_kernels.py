"""Kernels that map the keys of all tables of a batch in several threads: one call for each phase, so Python's lock is taken once.

Everything that a thread needs stands in arrays of numbers: a column of keys, a part of one, a table, and a job for the keys of a
table that have no row.
"""

import numpy as np
from numba import carray, prange

from dataloading.keys.kernels.compiled import kernel, parallel_kernel
from dataloading.keys.kernels.hash_index import find
from dataloading.keys.kernels.layouts import Column, Job, Kind, Part, pointer
from dataloading.keys.kernels.table_kernels import counts_of, index_of, insert_keys, see, take_due


@parallel_kernel
def see_parts(columns, parts, order, starts, tables, batch, seen, missing, drawn):
    """See the parts of all columns.

    `columns`: int64 [columns, Column]. `parts`: int64 [P, Part]; `SEEN` and `MISSING` are written. `order`: parts,
    share after share, int64 [P]. `starts`: of the shares in `order`, int64 [shares + 1]. `tables`: fields of all
    tables, int64 [tables, 2, Field]. `batch`: its number; with `NO_BATCH` keys are looked up only. `seen`: int32 [keys,
    3], in which a part has the memory of its own keys; as in `see`. `missing`: int64 [keys, 2], likewise.
    """
    for share in prange(len(starts) - 1):
        for number in range(starts[share], starts[share + 1]):
            _see_part(columns, parts[order[number]], tables, batch, seen, missing, drawn)


@kernel
def _see_part(columns, part, tables, batch, seen, missing, drawn):
    column = columns[part[Part.COLUMN]]
    keys = carray(pointer(column[Column.KEYS]), (column[Column.NUM_KEYS],), np.int64)
    runs = carray(pointer(column[Column.RUNS]), (column[Column.NUM_RUNS], 2), np.int64)
    narrow, wide = _rows_of(column)
    fields = tables[column[Column.TABLE], Kind.ROWS]
    cells, entries = index_of(fields)
    first = column[Column.OFFSET] + part[Part.BEGIN]
    part[Part.SEEN], part[Part.MISSING] = see(
        (keys, runs, part[Part.BEGIN], part[Part.END]),
        (narrow, wide, column[Column.FIRST]),
        (cells, entries, counts_of(fields)),
        batch,
        (seen[first:], missing[first:]),
        drawn,
    )


@kernel
def _rows_of(column):
    """Return the rows of a column, int32 and int64, of which one is empty."""
    narrow = carray(pointer(column[Column.NARROW]), (column[Column.NUM_NARROW],), np.int32)
    return narrow, carray(pointer(column[Column.WIDE]), (column[Column.NUM_WIDE],), np.int64)


@parallel_kernel
def share_jobs(workers, jobs, columns, parts, tables, rules, memory, drawn):
    for worker in prange(workers):
        do_jobs((worker, workers), jobs, columns, parts, tables, rules, memory, drawn)


@kernel
def do_jobs(share, jobs, columns, parts, tables, rules, memory, drawn):
    """Give rows to keys without one.

    `jobs`: int64 [jobs, Job]. `memory`: `missing` of `see_parts`, and for each key without a row, job after job: the key; new
    keys, their sightings and slots; candidates seen; what changes among candidates, as in `insert_keys`; and among rows.
    """
    for number in range(share[0], len(jobs), share[1]):
        job = jobs[number]
        _do_job(job, columns, parts, tables[job[Job.TABLE]], rules, memory, drawn)


@kernel
def _do_job(job, columns, parts, fields, rules, memory, drawn):
    # Threads take flat tuples only.
    missing, all_keys, candidates_seen = memory[0], memory[1], memory[5]
    new, new_candidates, new_rows = memory[2:5], memory[6:10], memory[10:14]
    candidates, rows = fields[Kind.CANDIDATES], fields[Kind.ROWS]
    batch, admit_after = rules
    own = slice(job[Job.OFFSET], job[Job.OFFSET] + job[Job.KEYS])
    keys = all_keys[own]
    new_keys, times, key_slots = new[0][own], new[1][own], new[2][own]
    _collect(job, columns, parts, missing, keys)
    times[:] = 1
    if admit_after > 1:
        job[Job.CANDIDATES_SEEN], num_new = _count(
            keys, new_keys, candidates, batch, candidates_seen[own], drawn
        )
        # If the batch alone has more candidates than are counted, the last ones are not.
        _, job[Job.CANDIDATES_CHANGED] = insert_keys(
            (new_keys[:num_new], times[:num_new], key_slots[:num_new], batch),
            candidates,
            _changes_of(new_candidates, own),
            drawn,
        )
        job[Job.DUE] = take_due(keys, candidates, admit_after, new_keys, times, drawn)
    else:
        new_keys[:] = keys
        job[Job.DUE] = len(keys)
    due = slice(0, job[Job.DUE])
    job[Job.DONE], job[Job.ROWS_CHANGED] = insert_keys(
        (new_keys[due], times[due], key_slots[due], batch), rows, _changes_of(new_rows, own), drawn
    )
    if admit_after > 1 or job[Job.DONE] < job[Job.DUE]:
        # Not every key without a row is new, or has got one.
        _find_rows(keys, rows, key_slots, drawn)
    _write_rows(job, columns, parts, missing, key_slots)


@kernel
def _changes_of(changes, own):
    slots, keys, old_keys, old_facts = changes
    return slots[own], keys[own], old_keys[own], old_facts[own]


@kernel
def _collect(job, columns, parts, missing, keys):
    at = 0
    for number in range(job[Job.FIRST_PART], job[Job.LAST_PART]):
        part = parts[number]
        first = columns[part[Part.COLUMN], Column.OFFSET] + part[Part.BEGIN]
        for i in range(first, first + part[Part.MISSING]):
            keys[at] = missing[i, 0]
            at += 1


@kernel
def _count(keys, new_keys, fields, batch, seen, drawn):
    """Count the keys that are candidates; return how many, and how many others there are, which are new."""
    cells, entries = index_of(fields)
    runs = np.array([[0, len(keys)]])
    others = np.empty((len(keys), 2), np.int64)
    num_seen, num_new = see(
        (keys, runs, 0, len(keys)),
        (np.empty(0, np.int32), np.empty(0, np.int64), 0),
        (cells, entries, counts_of(fields)),
        batch,
        (seen, others),
        drawn,
    )
    new_keys[:num_new] = others[:num_new, 0]
    return num_seen, num_new


@kernel
def _find_rows(keys, fields, key_slots, drawn):
    """Write the rows of keys, 0 of those without one."""
    cells, entries = index_of(fields)
    for i in range(len(keys)):
        key_slots[i] = entries[find(cells, entries, keys[i], drawn), 2]


@kernel
def _write_rows(job, columns, parts, missing, key_slots):
    """Write the rows of keys that had none before where this rank needs them."""
    number_of_key = 0
    for number in range(job[Job.FIRST_PART], job[Job.LAST_PART]):
        part = parts[number]
        column = columns[part[Part.COLUMN]]
        narrow, wide = _rows_of(column)
        first = column[Column.OFFSET] + part[Part.BEGIN]
        for i in range(first, first + part[Part.MISSING]):
            at = missing[i, 1]
            if 0 <= at < len(narrow):
                narrow[at] = key_slots[number_of_key]
            elif 0 <= at < len(wide):
                wide[at] = key_slots[number_of_key]
            number_of_key += 1
