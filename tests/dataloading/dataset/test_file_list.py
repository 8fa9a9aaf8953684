"""File lists as HugeCTR and NVTabular have them: written and read in order, and refused in one line."""

import re

import pytest

from dataloading.dataset.documents import file_list_text, is_file_list, read_file_list


def test_names_of_file_lists_are_those_of_hugectr():
    lists = ["_file_list.txt", "a/file_list.txt", "file_list_test.txt", "file_list.0.txt"]
    assert all(map(is_file_list, lists))
    others = ["my_file_list.txt", "file_list.csv", "file_list.txt/part", "list.txt"]
    assert not any(map(is_file_list, others))


def test_a_list_comes_back_in_its_order(tmp_path):
    names = ["b.parquet", "sub/a.parquet", "a b.parquet"]
    assert file_list_text(names) == "3\nb.parquet\nsub/a.parquet\na b.parquet\n"
    (tmp_path / "_file_list.txt").write_text(file_list_text(names))
    assert read_file_list(tmp_path / "_file_list.txt") == names
    (tmp_path / "_file_list.txt").write_bytes(b"1\r\nb.parquet\r\n\r\n")
    assert read_file_list(tmp_path / "_file_list.txt") == ["b.parquet"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: got '', want the number of files, then one path per line"),
        ("a.parquet\n", "line 1: got 'a.parquet', want the number of files"),
        ("0\n", "line 1: got '0', want the number of files"),
        ("9999999999\na\n", "line 1: got '9999999999', want the number of files"),
        ("2\na\n", "its first line says 2 files, and 1 follow; correct the list"),
        ("1\na\nb\n", "its first line says 1 files, and 2 follow; correct the list"),
        ("2\na\n./a\n", "lists 'a' twice; its rows would count twice, so drop one"),
    ],
)
def test_a_malformed_list_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "_file_list.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}[:,] {re.escape(message)}"):
        read_file_list(path)
