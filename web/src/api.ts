import { keyStore, wantKey } from "./key";
import { readEvents } from "./sse";

/** What the server answered instead of what was asked for; `message` is in words. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

/** What is to be told of an error, whatever it is. */
export function told(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  if (keyStore.value.key !== null) headers.set("authorization", `Bearer ${keyStore.value.key}`);
  let response: Response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached. Check that it still runs.", 0);
  }
  if (response.status === 401) wantKey();
  if (!response.ok) throw new ApiError(errorMessage(await response.text(), response.status), response.status);
  return response;
}

function errorMessage(body: string, status: number): string {
  try {
    const message: unknown = JSON.parse(body)?.error?.message;
    if (typeof message === "string") return message;
  } catch {
    // A proxy's answer, in whatever form.
  }
  return `The server answered with status ${status}.`;
}

export async function getText(path: string): Promise<string> {
  return (await request(path)).text();
}

export async function getJson<T>(path: string): Promise<T> {
  return (await request(path)).json();
}

/** What `/ready` says, which it does with a status of 503 as well. */
export async function getReadiness(): Promise<{ status: string; reason: string }> {
  try {
    return await (await fetch("/ready", { cache: "no-store" })).json();
  } catch {
    throw new ApiError("The server cannot be reached. Check that it still runs.", 0);
  }
}

/** Posts a request and calls `take` with each chunk of the answer as it comes. */
export async function stream<T>(path: string, body: object, signal: AbortSignal, take: (chunk: T) => void): Promise<void> {
  const response = await request(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (response.body === null) throw new ApiError("The server sent no answer.", response.status);
  for await (const data of readEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, response.status);
    take(chunk);
  }
  throw new ApiError("The answer broke off. Check that the server still runs.", response.status);
}
