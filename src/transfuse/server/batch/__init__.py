"""Files of requests, as OpenAI's batch API has them, answered by the server's own application."""

from transfuse.server.batch.files import BatchFiles
from transfuse.server.batch.run import BatchReport, run_batch

__all__ = ["BatchFiles", "BatchReport", "run_batch"]
