"""Publishes a dataset's folder on the Hugging Face hub.

Importing this module requires the package huggingface_hub.
"""

from __future__ import annotations

from pathlib import Path

from gangline.domain.errors import GanglineError, InvalidRequest
from gangline.settings.installation import package_command
from gangline.tasks.datasets.build import MANIFEST, Dataset

try:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
except ImportError as error:
    raise InvalidRequest(
        "publishing needs the Python package huggingface_hub, which is not installed: "
        f"{package_command('huggingface_hub')}"
    ) from error


def files_to_publish(made: Dataset) -> list[str]:
    return ["README.md", MANIFEST, *(file.path for file in made.files)]


def publish(made: Dataset, folder: Path, repository: str, *, token: str, private: bool) -> str:
    """Create the dataset's repository if it is missing, and commit the folder to it. Returns the commit's URL.

    Raises: GanglineError if the hub refuses.
    """
    api = HfApi(token=token)
    try:
        api.create_repo(repository, repo_type="dataset", private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository,
            repo_type="dataset",
            folder_path=folder,
            allow_patterns=files_to_publish(made),
            commit_message=f"{made.name}: {sum(file.num_rows for file in made.files)} rows",
        )
    except HfHubHTTPError as error:
        raise GanglineError(f"the hub refused {repository}: {error}") from error
    return str(done.commit_url)
