// Makes one decision, and goes on with it after whatever happened.
import { randomUUID } from "node:crypto";
import { closeSync, existsSync, fsyncSync, openSync, readFileSync, renameSync, writeSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { ChannelCredentials, type ChannelOptions, Metadata, type ServiceError, status } from "@grpc/grpc-js";
import {
  DecideRequest,
  type DecideResponse,
  DecisionServiceClient,
  DecisionServiceService,
  DecisionStatus,
  GetDecisionStatusRequest,
  type GetDecisionStatusResponse,
} from "./generated/decideonce/v1/decision_service";
import type { Duration } from "./generated/google/protobuf/duration";
import { RetryInfo } from "./generated/google/rpc/error_details";
import { Status } from "./generated/google/rpc/status";

const POLL_WAIT_S = 10;
const RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo";

export type Answer = Omit<DecideResponse, "replayed"> | GetDecisionStatusResponse;

/** Give the request that the work file holds. Where there is none yet: make it with a new key, and keep it first. */
export function begin(workFile: string, operation: string, facts: Record<string, unknown>): Buffer {
  if (!existsSync(workFile)) {
    const request = DecideRequest.fromPartial({ operation, operationKey: randomUUID(), facts });
    const file = openSync(`${workFile}.new`, "w");
    writeSync(file, DecideRequest.encode(request).finish());
    fsyncSync(file);
    closeSync(file);
    renameSync(`${workFile}.new`, workFile);
  }
  return readFileSync(workFile);
}

/** Ask until there is an answer that is final; throws the last error where time runs out or asking can't help. */
export async function finish(
  client: DecisionServiceClient,
  token: string,
  request: Buffer,
  withinS: number,
): Promise<Answer> {
  const end = Date.now() + withinS * 1000;
  // grpc-js doesn't take this from the service config.
  const metadata = new Metadata({ waitForReady: true });
  metadata.set("authorization", `Bearer ${token}`);
  const { operation, operationKey } = DecideRequest.decode(request);
  const statusRequest = GetDecisionStatusRequest.fromPartial({
    operation,
    operationKey,
    maxWait: { seconds: POLL_WAIT_S },
  });
  let isProcessing = false;
  let failures = 0;
  for (;;) {
    let pause: number;
    try {
      const answer: Answer = isProcessing
        ? await getStatus(client, statusRequest, metadata, end)
        : await decide(client, request, metadata, end);
      isProcessing = answer.status === DecisionStatus.DECISION_STATUS_PROCESSING;
      pause = milliseconds(answer.retryAfter);
      const isFinal = !isProcessing && answer.status !== DecisionStatus.DECISION_STATUS_FAILED_RETRYABLE;
      if (isFinal || Date.now() + pause > end) {
        return answer;
      }
      failures = 0;
    } catch (error) {
      const told = retryAfter(error as ServiceError);
      failures += 1;
      pause = (told ?? 0) + Math.random() * Math.min(2000, 100 * 2 ** failures);
      if (told === undefined || Date.now() + pause > end) {
        throw error;
      }
    }
    await sleep(pause);
  }
}

function decide(
  client: DecisionServiceClient,
  request: Buffer,
  metadata: Metadata,
  deadline: number,
): Promise<DecideResponse> {
  const { path, responseDeserialize } = DecisionServiceService.decide;
  // Not through a serializer: the very bytes that were kept.
  const asKept = (bytes: Buffer) => bytes;
  return new Promise((resolve, reject) => {
    client.makeUnaryRequest(path, asKept, responseDeserialize, request, metadata, { deadline }, (error, answer) =>
      error ? reject(error) : resolve(answer as DecideResponse),
    );
  });
}

function getStatus(
  client: DecisionServiceClient,
  request: GetDecisionStatusRequest,
  metadata: Metadata,
  deadline: number,
): Promise<GetDecisionStatusResponse> {
  return new Promise((resolve, reject) => {
    client.getDecisionStatus(request, metadata, { deadline }, (error, answer) =>
      error ? reject(error) : resolve(answer),
    );
  });
}

/** Tell how many milliseconds to wait before the same is sent again; undefined where sending it again can't help. */
export function retryAfter(error: ServiceError): number | undefined {
  for (const packed of error.metadata?.get("grpc-status-details-bin") ?? []) {
    const detail = Status.decode(packed as Buffer).details.find(({ typeUrl }) => typeUrl === RETRY_INFO);
    if (detail !== undefined) {
      return milliseconds(RetryInfo.decode(detail.value).retryDelay);
    }
  }
  // gRPC's own: a connection was lost, or a call took too long. The decision may have been made.
  return error.code === status.UNAVAILABLE || error.code === status.DEADLINE_EXCEEDED ? 0 : undefined;
}

function milliseconds(duration: Duration | undefined): number {
  return duration === undefined ? 0 : duration.seconds * 1000 + duration.nanos / 1e6;
}

/** Connect as the environment says, with the service config. */
export function connect(serviceConfigFile: string, options: ChannelOptions = {}): DecisionServiceClient {
  const server = process.env.DECIDEONCE_SERVER ?? "127.0.0.1:50051";
  const authority = process.env.DECIDEONCE_TLS_CA;
  const credentials =
    authority === undefined ? ChannelCredentials.createInsecure() : ChannelCredentials.createSsl(readFileSync(authority));
  const serviceConfig = readFileSync(serviceConfigFile, "utf8");
  return new DecisionServiceClient(server, credentials, { "grpc.service_config": serviceConfig, ...options });
}
